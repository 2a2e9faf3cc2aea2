"""Another package adds a format, a reward, a pair strategy and a loss: one file and one entry point each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gymdata
from gymdata.store import read_table
from tests.forks import Forks, forks, run
from tests.rollout_files import rollout, two_turns, write_run

PACKAGE = Path(__file__).parent / "example_package"
LOGS = [
    {"asked": "1+1?", "answered": "2, thank you", "stars": 5.0},
    {"asked": "1+1?", "answered": "3", "stars": 1.0},
    {"asked": "2+2?", "answered": "4", "stars": None},
]
#: A command in a process that has the package installed, and what it prints.
Command = Callable[..., str]


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    """Processes that have the package installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        patch.setenv("COLUMNS", "300")
        with forks("gymdata.cli.main", "pyarrow", "polars") as processes:
            yield processes


@pytest.fixture
def command(processes: Forks, tmp_path: Path) -> Command:
    def command(*words: str | Path, exit_code: int = 0) -> str:
        shown = tmp_path / "shown"
        code = processes.start(run, list(map(str, words)), shown, [2]).wait()
        assert code == exit_code, shown.read_text()
        return shown.read_text()

    return command


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    file = tmp_path / "logs.jsonl"
    file.write_text("".join(json.dumps(log) + "\n" for log in LOGS))
    return file


def test_a_format_is_recognised_imported_and_exported(command: Command, logs: Path, tmp_path: Path) -> None:
    """Without its name; a row that cannot be used is named with its line, and files go there and back, by two processes
    as by one."""
    logs.write_text(logs.read_text() + '{"asked": "?", "answered": 7}\n')
    shown = command("import", logs, "-o", tmp_path / "run", "--json", exit_code=1)
    (report,) = (json.loads(line) for line in shown.splitlines() if line.startswith("{"))
    assert (report["format"], report["rollouts"], report["reasons"], report["without_reward"]) == (
        "chat-log", 3, {"S102": 1}, 1,
    )  # fmt: skip
    (rejected,) = map(json.loads, (tmp_path / "run" / "rejected.jsonl").read_text().splitlines())
    assert (rejected["line"], rejected["reason"]) == (4, "answered: got 7, expected text")
    rows = read_table(tmp_path / "run").to_pylist()
    assert [row["rollout_index"] for row in rows] == [0, 1, 0]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"]
    command("export", tmp_path / "run", "--format", "chat-log", "-o", tmp_path / "back.jsonl")
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == LOGS


def test_a_format_is_known_to_every_command(command: Command, logs: Path) -> None:
    """validate names the import that reads it; help has its name."""
    assert f"`gymdata import {logs} -o RUN` reads it" in command("validate", logs, exit_code=2)
    assert "chat-log" in command("import", "--help")
    assert "chat-log" in command("export", "--help")


def test_a_reward_and_a_strategy_make_pairs(command: Command, logs: Path, tmp_path: Path) -> None:
    """Imported chat logs are scored by the reward; collected rollouts are paired by the strategy."""
    command("import", logs, "-o", tmp_path / "run")
    command("score", tmp_path / "run", "--reward", "polite")
    scores = read_table(tmp_path / "run" / "scores-polite" / "scores.parquet", gymdata.rollouts.schema.SCORES)
    assert scores["value"].to_pylist() == [1.0, 0.0, 0.0]
    run = write_run(tmp_path / "more", [rollout("t", k, float(k), two_turns(1, 20 + k)) for k in range(4)])
    command("pairs", run, "-o", tmp_path / "pairs", "--strategy", "second-best")
    (pair,) = read_table(tmp_path / "pairs", gymdata.rollouts.schema.PAIRS).to_pylist()
    assert (pair["chosen_rollout_id"], pair["rejected_rollout_id"]) == ("t-3", "t-2")


def test_a_strategy_is_in_the_help(command: Command) -> None:
    """A choice stands there with its text."""
    assert "second-best (the best rollout of each group and the one after it)" in command("pairs", "--help")


def use_the_loss() -> int:
    import torch

    from gymdata.commands.train.losses import LOSSES
    from gymdata.commands.train.settings import TrainRlConfig

    loss = LOSSES["advantage_only"]
    assert (loss.aggregation, loss.settings) == ("token", {"scale": 1.0})
    assert "scale" in TrainRlConfig.model_fields
    ones, mask = torch.ones(1, 2), torch.tensor([[True, False]])
    assert loss.function(-ones, -ones, ones * 2, mask, scale=3.0)[0].tolist() == [[6.0, 0.0]]
    return 0


@pytest.mark.torch
def test_a_loss_is_a_choice_with_its_settings(processes: Forks, command: Command) -> None:
    """Its name, its mean and its setting are those of train-rl, and its function is called masked."""
    assert processes.start(use_the_loss).wait() == 0
    assert "advantage_only" in command("train-rl", "--help")
