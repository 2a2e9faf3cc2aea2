"""``gymdata collect`` and ``gymdata score`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gymdata_cli.main import main

from gymdata.api import collecting
from gymdata.store import read_table
from tests.collect.fake_parts import parts

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
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "rollouts wanted" in said
    assert "numeric × 1" in said
    assert main([*argv, "--json", "--set", "engine.dtype=float32", "--temperature", "0.5"]) == 0
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
    argv = ["collect", tasks, "--config", str(tmp_path / "c.yaml"), "-r", "2", "--dry-run", "--json"]
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
    assert main(["score", str(tmp_path / "nosuch"), "--reward", "numeric"]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_names_of_an_environments_file_are_its_own(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a file imports is not offered when a name is not in it."""
    (tmp_path / "tools.py").write_text("from collections import Counter\nfrom typing import Any\nclass Sums: ...\n")
    assert main(["collect", tasks, "-m", POLICY, "--env", f"{tmp_path / 'tools.py'}:Calc"]) == 2
    said = capsys.readouterr().err
    assert "Sums" in said
    assert "Counter" not in said


def test_a_dry_run_tells_what_overwrite_would_remove(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite --dry-run counts the rollouts that are there, and leaves them there."""
    run = tmp_path / "run"
    collecting.collect(tasks=tasks, output=run, parts=parts())
    argv = ["collect", tasks, "-m", POLICY, "-o", str(run), "--dry-run", "--overwrite"]
    assert main(argv) == 0
    assert "2 rollouts that are there" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts_removed"] == 2
    assert read_table(run).num_rows == 2


def test_a_run_folders_pairs_must_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train-dpo RUN takes the pairs of its only pairs folder, and refuses to choose between several."""
    from gymdata.api.pairing import pairs_of_run
    from gymdata.errors import UsageError

    run = tmp_path / "run"
    for name in ("pairs-a", "pairs-b"):
        (run / name).mkdir(parents=True)
        (run / name / "run.json").write_text("{}")
    (run / "run.json").write_text("{}")
    (run / "pairs-a" / "pairs.parquet").touch()
    assert pairs_of_run(run) == [run / "pairs-a" / "pairs.parquet"]
    assert pairs_of_run(run / "pairs-a") is None
    (run / "pairs-b" / "pairs.parquet").touch()
    with pytest.raises(UsageError, match=r"pairs-a.*pairs-b"):
        pairs_of_run(run)
    assert main(["train-dpo", str(run), "-m", POLICY, "-o", str(tmp_path / "out")]) == 2
    assert "give one of them" in capsys.readouterr().err
