"""``make compare-trainers``: its commands, its figures and its reports, with trainings that were played."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from gymdata.errors import RefusedError
from gymdata.store import write_run_json
from tests.benchmarks.comparing import compare_trainers, markdown
from tests.report.made import make

FLAGS = Path(__file__).parents[1] / "cli" / "flags.txt"


class Played:
    """Leaves what each command would: held-out runs before and after with these rewards by task, and trainings."""

    def __init__(self, after: float) -> None:
        self.after, self.commands = after, list[Sequence[str]]()

    def __call__(self, command: Sequence[str], _: Collection[int]) -> None:
        self.commands.append(command)
        out = Path(command[command.index("-o") + 1]) if "-o" in command else Path()
        if command[0] == "collect":
            right = self.after if out.name in ("heldout-sft", "heldout-rl") else 0.0
            make(out, {f"t{i}": [float(i % 3 == 0) or right] for i in range(12)})
        elif command[0].startswith("train-"):
            tokens = {"batches": {"count": 99}, "equal": True}
            facts = {"stage": command[0], "steps": 3, "counts": {}, "trained_tokens": tokens}
            heldout = {"accuracy": 0.8, "pairs": 10, "tasks": 5, "ci95": [0.6, 0.9]}
            write_run_json(out, facts | ({"heldout": heldout} if command[0] == "train-reward" else {}))


def test_every_trainer_has_a_figure_and_a_report(tmp_path: Path) -> None:
    """The rise is that of the held-out runs, in the summary, the table and the report of each policy."""
    played = Played(1.0)
    summary = compare_trainers(
        tmp_path / "out", trainers=("sft", "rl", "reward"), run_command=played, say=lambda _: None
    )
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    for name in ("sft", "rl"):
        rise = summary["trainers"][name]
        assert (rise["after"]["successes"], rise["difference"]["rate"]) == (12, pytest.approx(8 / 12))
        page = (tmp_path / "out" / f"report-{name}.html").read_text()
        assert "<h1>33.3 % → 100.0 %, +66.7 points (" in page
    assert not (tmp_path / "out/report-reward.html").exists()
    table = markdown(summary)
    assert "| SFT on the best right rollout of each task | 3 | 99 | 100.0% of 12" in table
    assert "ranks 80.0% of 10 pairs of 5 held-out tasks right" in table


def test_a_trainer_that_raises_nothing_is_refused(tmp_path: Path) -> None:
    """The reports are written first: they show why. Where no task moved there is no interval in them."""
    with pytest.raises(RefusedError, match="not clearly better than before: sft"):
        compare_trainers(tmp_path / "out", trainers=("sft",), run_command=Played(0.0), say=lambda _: None)
    assert "<h1>33.3 % → 33.3 %, all 12 tasks equal</h1>" in (tmp_path / "out/report-sft.html").read_text()


def test_its_commands_have_the_flags_that_it_gives(tmp_path: Path) -> None:
    """Each is a command that a person could type."""
    played = Played(1.0)
    compare_trainers(tmp_path / "out", limit=3, threshold=False, run_command=played, say=lambda _: None)
    lines = [line.split(": ")[:2] for line in FLAGS.read_text().splitlines()]
    known = {(command, flag) for command, flags in lines for flag in flags.split()}
    given = {(command[0], word) for command in played.commands for word in command if word.startswith("-")}
    assert {command for command, _ in given} >= {"collect", "validate", "pairs", "experience", "train-dpo", "train-rl"}
    assert given - known == set()
