"""The tour: files that ship are copied whole, every question's command answers, and nothing else is touched."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.tour.run import prepare
from gymdata.errors import StoreError

#: A line of each answer, in the order of the questions.
FACTS = [
    "heldout-0016  eeadbeae7fa6dde6         6       0.5  0.547723",
    "before  …alculate",
    '{"score_1": 1, "score_2": 1, "ranking": 3.5}',
    "│     30     435   -0.0212  <tool_call>",
    "48.7 % → 69.3 %, +20.7 points (6.7–34.7), 25 tasks",
    "  pairs                  30",
]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> gymdata.tour:
    """The whole tour, once."""
    return gymdata.tour(tmp_path_factory.mktemp("tour") / "out")


def test_every_question_is_answered_by_its_command(toured: gymdata.tour) -> None:
    """300 rollouts, six questions; each answer is what the command prints about the shipped rollouts."""
    assert (toured.rollouts, toured.ok, toured.exit_code) == (300, True, 0)
    assert [step.exit_code for step in toured.steps] == [0] * 6
    assert [fact for fact, step in zip(FACTS, toured.steps, strict=True) if fact not in step.answer] == []
    assert all(step.question.endswith("?") and step.look_at.endswith(".") for step in toured.steps)
    steps = json.loads(json.dumps(toured.to_dict()))["steps"]
    commands = [step["command"].split()[1] for step in steps]
    assert commands == ["query", "show", "query", "show", "report", "pairs"]
    assert FACTS[4] in steps[4]["answer"]


def test_the_shipped_rollouts_are_sealed_and_small(tmp_path: Path) -> None:
    """Their hashes are those of run.json, only the eight breaks are errors, and all of it takes less than 3 MB."""
    out = prepare(tmp_path / "out").output
    assert sum(map(len, contents(out).values())) < 3_000_000
    found = gymdata.validate(out / "before", tokenizer=out / "tokenizer")
    assert (found.errors, found.by_code["T201"], found.trainable) == (8, 8, 142)
    assert gymdata.validate(out / "after").errors == 0


def test_no_output_of_the_tour_lacks_its_parents(toured: gymdata.tour) -> None:
    """`gymdata ls` on the tour's folder finds every output whole, with nothing that they were made from missing."""
    assert {output.path: output.state for output in gymdata.ls(toured.output).outputs} == dict.fromkeys(
        ["after", "before", "before/judge-genrm", "pairs"], "complete"
    )


def test_a_second_tour_writes_what_is_missing_only(tmp_path: Path) -> None:
    """What is whole stays untouched, what was lost or damaged comes back, and what the user put beside it stays."""
    out = prepare(tmp_path / "out").output
    before = contents(out)
    kept = out / "after" / "run.json"
    inode = kept.stat().st_ino
    (out / "before" / "rollouts" / "part-00000.parquet").write_bytes(b"")
    (out / "tokenizer" / "tokenizer.json").unlink()
    (out / "mine.txt").write_text("mine")
    prepare(out)
    assert contents(out) == {**before, "mine.txt": b"mine"}
    assert kept.stat().st_ino == inode


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer/tokenizer.json"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    """It is named, and nothing is written to it; a tokenizer alone is no interrupted tour."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match="is not empty and was not made by the tour"):
        prepare(tmp_path)
    assert contents(tmp_path) == {name: b"mine"}


@pytest.mark.full
def test_a_tour_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """A folder with the first of the copies, or none yet, and one that was being written, becomes the whole tour."""
    whole = prepare(tmp_path / "whole").output
    for done, begun in (((), "before/.run.json.tmp"), (("before/run.json",), "tokenizer/.tokenizer.json.tmp")):
        out = tmp_path / str(len(done))
        for name in (*done, begun):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes((whole / name).read_bytes() if name in done else b"{")
        assert contents(prepare(out).output) == contents(whole)


def test_the_command_prints_each_command_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Away from a terminal everything is printed and no viewer is started; what is printed can be run as it is."""
    monkeypatch.chdir(tmp_path)
    assert main(["tour"]) == 0
    shown = capfd.readouterr().out
    assert [fact for fact in FACTS if fact not in shown] == []
    commands = [shlex.split(line[2:]) for line in shown.splitlines() if line.startswith("$ ")]
    assert [words[1] for words in commands] == ["query", "show", "query", "show", "report", "pairs", "view"]
    assert main(commands[0][1:]) == 0
    assert FACTS[0] in capfd.readouterr().out
