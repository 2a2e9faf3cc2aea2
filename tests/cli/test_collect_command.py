"""``gymdata collect`` and ``gymdata score`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gymdata_cli.main import main

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return str(path)


def test_dry_run_shows_the_plan_and_writes_nothing(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--dry-run checks tasks, model, tokenizer and rewards, prints one object, and makes no folder."""
    run = tmp_path / "run"
    argv = ["collect", tasks, "-m", POLICY, "-o", str(run), "-r", "3", "--reward", "numeric", "--dry-run"]
    assert main([*argv, "--set", "engine.dtype=float32", "--temperature", "0.5"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["tasks"], plan["rollouts_wanted"]) == (2, 6)
    assert (plan["identity"]["dtype"], plan["identity"]["temperature"]) == ("float32", 0.5)
    assert len(plan["identity"]["policy_hash"]) == 32
    assert not run.exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-m", "/nowhere/model"], "no such file or folder"),
        ([], "no model given"),
        (["-m", POLICY, "--reward", "numerik"], "did you mean 'numeric'"),
        (["-m", POLICY, "--env", "missing.py:Name"], "no such file"),
        (["-m", POLICY, "--set", "temprature=1"], "did you mean 'temperature'"),
        (["-m", POLICY, "--temperature", "-1"], "temperature"),
        (["-m", "x", "--endpoint", "http://127.0.0.1:9"], "--tokenizer"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    """Bad input ends with exit code 2, a message that helps, and no run folder."""
    run = tmp_path / "run"
    assert main(["collect", tasks, "-o", str(run), *more]) == 2
    assert said in capsys.readouterr().err
    assert not run.exists()


def test_tasks_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing task file, and no task file at all, are usage errors."""
    assert main(["collect", str(tmp_path / "no.jsonl"), "-m", POLICY]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["collect", "-m", POLICY]) == 2
    assert "tasks" in capsys.readouterr().err


def test_a_config_file_is_beaten_by_flags(tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--config gives the settings, flags win."""
    (tmp_path / "c.yaml").write_text(f"model: {POLICY}\nnum_rollouts: 4\nreward: [numeric]\nmax_tokens: 9\n")
    argv = ["collect", tasks, "--config", str(tmp_path / "c.yaml"), "-r", "2", "--dry-run"]
    assert main(argv) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["rollouts_wanted"], plan["identity"]["max_tokens"]) == (4, 9)


def test_scoring_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """score on a folder that is not a run says so."""
    (tmp_path / "x.txt").write_text("")
    assert main(["score", str(tmp_path), "--reward", "numeric"]) == 2
    assert "run" in capsys.readouterr().err
    assert main(["score", str(tmp_path)]) == 2
    assert "reward" in capsys.readouterr().err
