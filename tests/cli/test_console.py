"""Tables and progress as a terminal, a pipe and a reader of logs get them."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli import console
from gymdata.cli.console import Watch, facts, grid
from gymdata.cli.main import main
from gymdata.public import Report, Row
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(3)])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout and stderr are a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    # Each phase of a test has streams of its own, of one kind.
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the progress takes for the time."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


@dataclass(repr=False)
class Counted(Report):
    count: float

    @property
    def exit_code(self) -> int:
        return 1

    def rows(self) -> list[Row]:
        return [("how many", self.count)]


def test_a_command_ends_with_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, as what the command prints itself, or as one JSON object; the exit code is the report's."""
    assert console.finish(Counted(1234), "counted", json=False) == 1
    assert "how many   1,234" in capsys.readouterr().out
    assert console.finish(Counted(2), lambda: console.say("two"), json=False) == 1
    assert capsys.readouterr().out == "two\n"
    assert console.finish(Counted(float("nan")), "counted", json=True) == 1
    assert json.loads(capsys.readouterr().out) == {"count": "NaN"}
    assert repr(Counted(2)) == "Counted(count=2)"


@pytest.mark.usefixtures("terminal")
def test_rows_wider_than_the_terminal_stand_one_value_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every column is there with its value, no line is longer than the terminal, and what was cut is told."""
    assert main(["query", "select * from rollouts order by rollout_index limit 2", str(run)]) == 0
    said = capsys.readouterr()
    lines = [line.strip() for line in said.out.splitlines()]
    assert [line for line in lines if line.startswith("row ")] == ["row 1", "row 2"]
    assert [line.split() for line in lines if line.startswith("rollout_id")] == [
        ["rollout_id", "t-0"],
        ["rollout_id", "t-1"],
    ]
    assert sum(line.startswith("turns") for line in lines) == 2
    assert "…" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert len(lines) > 2 * 20
    assert "--json" in said.err


@pytest.mark.usefixtures("terminal")
def test_rows_that_fit_stay_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Few columns are shown side by side, without a note."""
    assert main(["query", "select rollout_id, reward from rollouts", str(run)]) == 0
    said = capsys.readouterr()
    assert "row 1" not in said.out
    assert "━" in said.out or "─" in said.out
    assert said.err == ""


@pytest.mark.usefixtures("terminal")
def test_no_rows_of_many_columns_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a row the columns are named in one line rather than folded into a table."""
    assert main(["query", "select * from rollouts limit 0", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("no rows of rollout_id, run_id")


@pytest.mark.usefixtures("terminal")
def test_the_steps_of_a_filter_are_readable_on_a_narrow_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a row for each step, below the name of the command; its long texts are folded in their columns."""
    where = "reward > 0.5 and n_turns < 1_000 and rollout_id is not null and task_id is not null"
    assert main(["filter", str(run), "--where", where, "--dry-run"]) == 0
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "filter"
    (first,) = [line.split() for line in lines if line.strip().startswith("where reward")]
    assert [word for word in first if word.isdecimal()] == ["3", "2", "1", "1"]
    assert max(map(len, lines)) <= 80


def test_a_pipe_has_the_width_that_columns_says(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `ls` then the last columns are left out, and named."""
    assert main(["ls", str(run.parent)]) == 0
    assert "changed (UTC)" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["ls", str(run.parent)]) == 0
    shown = capsys.readouterr()
    assert "changed (UTC)" not in shown.out
    assert max(map(len, shown.out.splitlines())) <= 40
    assert "left out on this terminal: changed (UTC), parents" in shown.err


FIGURES = {"loss": 0.693147, "accuracy": 0.75, "margin": 0.0123, "learning_rate": 1e-5, "grad_norm": 1.25}
SHOWN = "loss 0.6931  accuracy 75.0%  margin 0.0123  lr 1e-05  grad 1.25"
#: Updates, each with the seconds since the one before, and the lines that they give.
PROGRESS: dict[str, tuple[str, list[tuple[int, dict[str, Any]]], list[str]]] = {
    "a rate is that since the first request, not that of a burst": (
        "collect",
        [(0, {"done": 0, "total": 800}), (6, {"done": 1}), (6, {"done": 41})],
        ["collect 1/800  10/min  1:19:54 left", "collect 41/800  205/min  0:03:43 left"],
    ),
    "a rate counts from the first update": (
        "score",
        [(40, {"done": 100, "total": 240, "tokens": 50}), (4, {"done": 140, "tokens": 850})],
        ["score 100/240", "score 140/240  600/min  200 tok/s  0:00:10 left"],
    ),
    "what came at once has no rate": (
        "score",
        [(40, {"done": 240, "total": 240, "tokens": 9}), (1, {"done": 240, "tokens": 9})],
        ["score 240/240  took 0:00:00"],
    ),
    "the last line says how long it took": (
        "score",
        [(40, {"done": 0, "total": 2}), (3723, {"done": 2})],
        ["score 0/2", "score 2/2  took 1:02:03"],
    ),
    "a training shows its figures and the time left": (
        "training",
        [
            (0, {"done": 30, "total": 120, "tokens": 50}),
            (6, {"done": 40, "tokens": 12_050, **FIGURES}),
            (200, {"done": 120, "tokens": 12_050}),
        ],
        [
            f"training 40/120  {SHOWN}  2,000 tok/s  0:00:48 left",
            f"training 120/120  {SHOWN}  2,000 tok/s  took 0:03:26",
        ],
    ),
    "what a training scores first has a rate of its own": (
        "training",
        [
            (0, {"scored": 8, "total": 408}),
            (10, {"scored": 208}),
            (10, {"done": 0, "total": 40, "tokens": 0}),
            (6, {"done": 10, "tokens": 12_000, "loss": 0.5}),
            (6, {"done": 20, "tokens": 24_000}),
        ],
        [
            "training: scoring 208/408  1,200/min  0:00:10 left",
            "training 0/40",
            "training 10/40  loss 0.5  2,000 tok/s  0:00:18 left",
            "training 20/40  loss 0.5  2,000 tok/s  0:00:12 left",
        ],
    ),
}


@pytest.mark.parametrize("case", PROGRESS)
def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], clock: list[float], case: str
) -> None:
    """What is done, how fast, and the time left, once that is known."""
    what, updates, lines = PROGRESS[case]
    with Watch(what) as watch:
        for seconds, counts in updates:
            clock[0] += seconds
            watch.update(**counts)
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", [80, 100, 160])
def test_a_bar_shows_every_figure_at_every_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: list[float], columns: int
) -> None:
    """Beside the bar, folded where it is narrow; no label is torn from its number and no line is too long."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with Watch("training") as watch:
        watch.update(done=1, total=1201, tokens=1)
        clock[0] += 60
        watch.update(done=121, total=1201, tokens=120_001, **FIGURES)
    shown = re.sub(r"\x1b\[[?\d;]*\w|\r", "", capsys.readouterr().err.replace("\u00a0", " "))
    shown = shown[shown.rindex("training") :]
    for part in ("121/1,201", "loss 0.6931", "accuracy 75.0%", "margin 0.0123", "lr 1e-05", "grad 1.25",
                 "2,000 tok/s", "0:09:00 left"):  # fmt: skip
        assert part in shown
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    assert max(map(len, lines)) <= columns
    assert len(lines) == {80: 3, 100: 2, 160: 1}[columns]


def test_piped_tables_have_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody looks no line of a table ends with blanks, and a long value stays on one line."""
    path = "/some/where/" + "long/" * 40
    facts("title", [("name", 1), ("longer name", "text"), ("path", path)])
    grid(["a", "b"], [[1, "x"], [2, "longer"], [3, path]], "another")
    out = capsys.readouterr().out
    assert out.count(path) == 2
    lines = out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert any("longer name" in line for line in lines)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("counts", [{}, {"done": 1, "total": 2}])
def test_a_bar_without_a_count_is_removed(
    counts: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What never counted leaves nothing on the screen; what did stays."""
    monkeypatch.setenv("TERM", "xterm")
    with Watch("filter") as watch:
        if counts:
            watch.update(**counts)
    erased = "\x1b[2K"
    after_last = capsys.readouterr().err.rpartition("filter")[2]
    assert (erased in after_last) is not bool(counts)


def test_what_is_left_behind_prints_on_stderr_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints during a stage, and those of a thread that outlives it, are no data; the command's own are."""
    over, printed = threading.Event(), threading.Event()

    def late() -> None:
        over.wait()
        sys.stdout.write("late\n")
        printed.set()

    with console.data_alone():
        with Watch("stage"):
            sys.stdout.write("early\n")
            threading.Thread(target=late, daemon=True).start()
        over.set()
        printed.wait()
        console.say("data")
    shown = capsys.readouterr()
    assert shown.out == "data\n"
    assert shown.err == "early\nlate\n"


def test_a_value_is_there_beside_a_long_name(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    """On a narrow terminal names wrap; a number and a path are always printed, in full."""
    path = "/data/runs/exported.jsonl"
    facts("export", [("rows", 1234), ("lost: where the last generation ended " * 2, 24), ("written to", path)])
    out = capsys.readouterr().out
    assert "1,234" in out
    assert path in "".join(line[40:].strip() for line in out.splitlines())
    assert "…" not in out


@pytest.mark.usefixtures("terminal")
def test_a_long_name_in_a_summary_is_indented_where_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    """It does not look like two entries; on a wide terminal it is one line."""
    name = "  lost: where the last generation ended (a chat template closes it in its own way)"
    console.facts(
        "export", [("rows", 24), (name, 24), ("  lost: rewards", 24), ("written to", "/tmp/a/folder/file.jsonl")]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = next(n for n, line in enumerate(lines) if "where the last" in line)
    assert lines[at].startswith("    lost: where the last generation ended")
    assert lines[at].endswith(" 24")
    assert lines[at + 1].startswith("    ")
    assert lines[at + 1].strip() in name
    assert max(map(len, lines)) <= 80


def test_messages_break_between_words_on_a_terminal(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors and notes, with what continues indented; a line with a command to copy stays whole."""
    assert main(["export", "nowhere", "--format", "opnai", "-o", "x.jsonl"]) == 2
    error = capsys.readouterr().err
    assert max(map(len, error.splitlines())) <= 80
    assert "expected one of 18, such as atif, nat-dpo" in error
    assert "--help lists all" in error
    console.note("a line of words " * 8 + "\n  → " + "gymdata score runs/x " * 5)
    words, command = capsys.readouterr().err.rstrip("\n").rsplit("\n", 1)
    assert [len(line) <= 80 for line in words.split("\n")] == [True, True]
    assert command == "  → " + "gymdata score runs/x " * 5


def test_messages_in_a_pipe_are_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader of lines gets each in one."""
    console.note("a line of words " * 8)
    assert capsys.readouterr().err == "a line of words " * 8 + "\n"


def test_a_command_ends_with_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pairs` names the training of what it wrote, quoted for a shell; with --json it prints one object alone."""
    rollouts = str(Path(gymdata.__file__).parent.parent / "sample_data" / "rollouts" / "clean.jsonl")
    assert main(["pairs", rollouts, "-o", str(tmp_path / "my pairs")]) == 0
    written = tmp_path / "my pairs"
    assert capsys.readouterr().out.splitlines()[-1] == f"next: gymdata train-dpo '{written}' -m MODEL -o POLICY"
    assert main(["pairs", rollouts, "-o", str(tmp_path / "b"), "--json"]) == 0
    assert "next:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "then"),
    [
        ("filter {run} --where true -o {out}", "train-sft {out} -m MODEL -o POLICY"),
        ("filter {run} {other} -o {out}", "train-sft {out} -m MODEL -o POLICY"),
        ("score {run} --reward contains:a", "pairs {run}"),
    ],
)
def test_what_is_written_for_another_command_names_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, then: str
) -> None:
    """The last line is the command that reads what was written."""
    paths = {"run": run, "other": tmp_path / "other", "out": tmp_path / "out"}
    write_run(paths["other"], [rollout("u", 0, 1.0, two_turns(4, 20))])
    assert main(command.format(**paths).split()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: gymdata {then.format(**paths)}"


def test_the_command_after_a_second_score_names_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the flag `pairs` would ask which score is meant; the line as it is printed makes the pairs."""
    for text, flag in (("a", ""), ("b", " --reward second")):
        name = ["--name", "second"] if flag else []
        assert main(["score", str(run), "--reward", f"contains:{text}", *name]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line == f"next: gymdata pairs {run}{flag}"
    main(line.removeprefix("next: gymdata ").split())
    assert "could be meant" not in capsys.readouterr().err


def test_the_command_after_an_import_reads_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags that named columns, failures and the split are in it; after a split the training side is trained."""
    policy = Path(gymdata.__file__).parent.parent / "sample_data" / "policy"
    file, out = tmp_path / "my rows.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps({"Frage": f"{n}+1?", "Antwort": str(n + 1)}) + "\n" for n in range(4)))
    mapped = ["--map", "prompt=Frage", "--map", "answer=Antwort", "--test-share", "0.5", "--seed", "3"]
    assert main(["import", str(file), "-o", str(out), *mapped]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    flags = "--map prompt=Frage --map answer=Antwort --test-share 0.5 --seed 3"
    assert line == f"next: gymdata import '{file}' {flags} -m MODEL -o TOKENS"
    named = {"MODEL": str(policy), "TOKENS": str(tmp_path / "tokens")}
    words = [named.get(word, word) for word in shlex.split(line.removeprefix("next: gymdata "))]
    assert main(words) == 0
    then = capsys.readouterr().out.splitlines()[-1]
    data = tmp_path / "tokens" / "split" / "train.parquet"
    assert then == f"next: gymdata train-sft {data} -m MODEL -o POLICY --allow-rendered --select all"
    assert data.is_file()
