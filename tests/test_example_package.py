"""Another package adds a format, a reward, a pair strategy, an environment and a loss: one file and one entry point each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gymdata
from gymdata.store import read_table
from tests.rollout_files import rollout, two_turns, write_run

PACKAGE = Path(__file__).parent / "example_package"
LOGS = [
    {"asked": "1+1?", "answered": "2, thank you", "stars": 5.0},
    {"asked": "1+1?", "answered": "3", "stars": 1.0},
    {"asked": "2+2?", "answered": "4", "stars": None},
]


def python(code: str, *words: str | Path, exit_code: int = 0) -> str:
    """What a program prints that has the package installed."""
    path = os.pathsep.join(map(str, [PACKAGE, Path(gymdata.__file__).parents[1]]))
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == exit_code, done.stderr
    return done.stdout + done.stderr


def command(*words: str | Path, exit_code: int = 0) -> str:
    return python(
        "import sys; from gymdata.cli.main import main; sys.exit(main(sys.argv[1:]))", *words, exit_code=exit_code
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    file = tmp_path / "logs.jsonl"
    file.write_text("".join(json.dumps(log) + "\n" for log in LOGS))
    return file


def test_a_format_is_recognised_imported_and_exported(logs: Path, tmp_path: Path) -> None:
    """Without its name; a row that cannot be used is named with its line, and files go there and back, by two processes
    as by one."""
    logs.write_text(logs.read_text() + '{"asked": "?", "answered": 7}\n')
    found = json.loads(command("import", logs, "-o", tmp_path / "run", "--json", exit_code=1).splitlines()[0])
    assert (found["format"], found["rollouts"], found["reasons"], found["without_reward"]) == (
        "chat-log", 3, {"S102": 1}, 1,
    )  # fmt: skip
    (rejected,) = map(json.loads, (tmp_path / "run" / "rejected.jsonl").read_text().splitlines())
    assert (rejected["line"], rejected["reason"]) == (4, "answered: got 7, expected text")
    rows = read_table(tmp_path / "run").to_pylist()
    assert [row["rollout_index"] for row in rows] == [0, 1, 0]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"]
    command("export", tmp_path / "run", "--format", "chat-log", "-o", tmp_path / "back.jsonl", "--workers", "2")
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == LOGS


def test_a_format_is_known_to_every_command(logs: Path) -> None:
    """validate says what the file holds and what to do; help has its name."""
    assert f"{logs}: contains chat logs" in command("validate", logs, exit_code=2)
    assert "chat-log" in command("import", "--help")
    assert "chat-log" in command("export", "--help")


def test_a_reward_and_a_strategy_make_pairs(logs: Path, tmp_path: Path) -> None:
    """Imported chat logs are scored by the reward; collected rollouts are paired by the strategy."""
    command("import", logs, "-o", tmp_path / "run")
    command("score", tmp_path / "run", "--reward", "polite")
    scores = read_table(tmp_path / "run" / "scores-polite" / "scores.parquet", gymdata.rollouts.schema.SCORES)
    assert scores["value"].to_pylist() == [1.0, 0.0, 0.0]
    run = write_run(tmp_path / "more", [rollout("t", k, float(k), two_turns(1, 20 + k)) for k in range(4)])
    command("pairs", run, "-o", tmp_path / "pairs.parquet", "--strategy", "second-best")
    (pair,) = read_table(tmp_path / "pairs.parquet", gymdata.rollouts.schema.PAIRS).to_pylist()
    assert (pair["chosen_rollout_id"], pair["rejected_rollout_id"]) == ("t-3", "t-2")


def test_an_environment_brings_its_tasks_and_scores(tmp_path: Path) -> None:
    """By name, without TASKS; its arguments reach it."""
    python(
        "import sys, gymdata; from tests.collect.fake_parts import FakeSampler, parts\n"
        "sampler = FakeSampler(lambda prompt, rng: 'yes')\n"
        "gymdata.collect(env='echo:words', output=sys.argv[1], parts=parts(sampler, env='echo:words'), num_rollouts=2,\n"
        "                env_args={'words': ['yes', 'no', 'why']})",
        tmp_path / "run",
    )
    rows = read_table(tmp_path / "run").to_pylist()
    assert [(row["task_id"], row["reward"]) for row in rows] == [
        *[("words-0", 1.0)] * 2, *[("words-1", 0.0)] * 2, *[("words-2", 0.0)] * 2,
    ]  # fmt: skip


def test_a_reward_is_in_the_documentation_and_a_strategy_in_the_help() -> None:
    """The table of rewards is made where it is read; a choice stands there with its text."""
    assert "| `polite` | The last message says please or thank you |" in command("docs", "your-reward")
    assert "second-best (the best rollout of each group and the one after it)" in command("pairs", "--help")


@pytest.mark.torch
def test_a_loss_is_a_choice_with_its_settings() -> None:
    """Its name, its mean and its setting are those of train-rl, and its function is called masked."""
    said = python(
        "import torch; from gymdata.train.losses import LOSSES\n"
        "from gymdata.train.settings import TrainRlConfig\n"
        "made = LOSSES['advantage_only']; print(made.aggregation, made.settings, 'scale' in TrainRlConfig.model_fields)\n"
        "ones = torch.ones(1, 2); mask = torch.tensor([[True, False]])\n"
        "print(made.function(-ones, -ones, ones * 2, mask, scale=3.0)[0].tolist())"
    )
    assert said.splitlines() == ["token {'scale': 1.0} True", "[[6.0, 0.0]]"]
    assert "advantage_only" in command("train-rl", "--help")
    assert "| `advantage_only` | −scale·A·ℓ | token | `scale` 1 |" in command("docs", "batch-rl")
