"""``gymdata collect`` and ``gymdata score`` as they are typed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.commands.collect import run as collecting
from tests.collect.fake_parts import parts

pytestmark = pytest.mark.torch

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return str(path)


def test_dry_run_shows_the_plan_and_writes_nothing(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--dry-run checks tasks, model, tokenizer and rewards, shows the first prompt, and makes no folder."""
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
    assert plan["prompt"] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert not run.exists()


#: Words, of which HERE is the test's folder, and what is said of them.
WRONG = [
    ("-m /nowhere/model", "no such file or folder"),
    ("", "no model given"),
    (f"-m {POLICY} --reward numerik", "did you mean 'numeric'"),
    (f"-m {POLICY} --env missing.py:Name", "no such file"),
    (f"-m {POLICY} --set temprature=1", "did you mean 'temperature'"),
    (f"-m {POLICY} --temperature -1", "temperature"),
    (f"-m {POLICY} -o HERE/file", "is a file, expected a folder"),
    (f"-m {POLICY} -o HERE/file/run", "HERE/file is a file"),
    (f"-m {POLICY} -o HERE/mine", "is not empty, and no run.json says what it holds"),
    (f"-m {POLICY} --set engine.gpu_memory_utilisation=1", "did you mean 'gpu_memory_utilization'"),
    (f"-m {POLICY} --set engine.dtype=bf16", "--set engine.dtype: got 'bf16', expected one of auto, half, float16"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0].removeprefix(f"-m {POLICY} "))
def test_what_is_wrong_is_said_before_anything_is_made(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, str]
) -> None:
    """Bad input ends with exit code 2, a message that helps, and no run folder, with and without --dry-run."""
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    words, says = (part.replace("HERE", str(tmp_path)) for part in case)
    output = [] if "-o " in words else ["-o", str(tmp_path / "run")]
    for dry in (["--dry-run"], []):
        assert main(["collect", tasks, *output, *words.split(), *dry]) == 2
        assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "tasks.jsonl", "thesis.txt"]


def test_a_config_file_is_beaten_by_flags(tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--config gives the settings, flags win."""
    (tmp_path / "c.yaml").write_text(f"model: {POLICY}\nnum_rollouts: 4\nreward: [numeric]\nmax_tokens: 9\n")
    argv = ["collect", tasks, "--config", str(tmp_path / "c.yaml"), "-r", "2", "--dry-run", "--json"]
    assert main(argv) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["rollouts_wanted"], plan["identity"]["max_tokens"]) == (4, 9)


def test_names_of_an_environments_file_are_its_own(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a file imports is not offered when a name is not in it."""
    (tmp_path / "tools.py").write_text("from collections import Counter\nfrom typing import Any\nclass Sums: ...\n")
    assert main(["collect", tasks, "-m", POLICY, "--env", f"{tmp_path / 'tools.py'}:Calc"]) == 2
    said = capsys.readouterr().err
    assert "Sums" in said
    assert "Counter" not in said


def test_a_run_folders_pairs_must_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train-dpo RUN takes the pairs of its only pairs folder, and refuses to choose between several."""
    from gymdata.commands.pairs.run import pairs_of_run
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
    command = f"gymdata train-dpo {run / 'pairs-a'} -m {POLICY} -o {tmp_path / 'out'}"
    assert f"give one of them, as in: {command}" in capsys.readouterr().err


def test_a_dry_run_finds_a_server_that_is_not_there(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens at the URL: exit code 3, at once, naming the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        words = ["-m", "x", "--tokenizer", POLICY, "--endpoint", url]
        assert main(["collect", tasks, "-o", str(tmp_path / "run"), "--dry-run", *words]) == 3
    assert f"engine: {url} cannot be reached: nothing answers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_what_differs_from_the_run_that_is_there(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another temperature than the run was collected with is refused by name before anything starts."""
    run = tmp_path / "run"
    collecting.collect(tasks=tasks, output=run, parts=parts())
    assert main(["collect", tasks, "-m", POLICY, "-o", str(run), "--dry-run", "--temperature", "0.5"]) == 2
    assert "temperature: run has 1.0, now 0.5" in capsys.readouterr().err
