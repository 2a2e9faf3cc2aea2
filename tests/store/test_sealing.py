"""Sealing: a crash between any two steps, and a killed process, lose and double nothing."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gymdata.errors import DataError, StoreError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import Run, read_run_json, read_table, tables
from gymdata.store.lines import encode
from gymdata.store.paths import Source
from gymdata.store.reading import DataWarning
from gymdata.store.sinks import ParquetSink
from gymdata.store.tables import scan_batches
from tests.forks import forks
from tests.store.conftest import make_row

PART = {"parquet": "part-00000.parquet", "jsonl": "part-00000.jsonl"}


@pytest.fixture(params=["parquet", "jsonl"])
def states(request, tmp_path: Path, open_run, interrupted, row) -> tuple[Path, Path, str]:
    """The same run before and after its segment was sealed."""
    before, after = tmp_path / "before", tmp_path / "after"
    interrupted(map(row, range(3)), folder=before)
    shutil.copytree(before, after)
    open_run(folder=after, format=request.param).close()
    return before, after, request.param


def crash(step: str, states: tuple[Path, Path, str], run: Path) -> None:
    """Make ``run`` look as a crash right after ``step`` leaves it; lines that stay lines have only their name to get."""
    before, after, suffix = states
    shutil.copytree(before, run)
    rollouts, part = run / "rollouts", PART[suffix]
    whole = (after / "rollouts" / part).read_bytes()
    if suffix == "parquet":
        if step == "writing":
            (rollouts / f".{part}.tmp").write_bytes(whole[: len(whole) // 2])
        if step == "written":
            (rollouts / f".{part}.tmp").write_bytes(whole)
        if step in ("renamed", "named", "dropped"):
            (rollouts / part).write_bytes(whole)
        if step == "dropped":
            (rollouts / PART["jsonl"]).unlink()
    if step in ("named", "dropped"):
        shutil.copy(after / "run.json", run / "run.json")


@pytest.mark.parametrize("step", ["started", "writing", "written", "renamed", "named", "dropped"])
def test_a_crash_at_any_step_of_sealing_changes_nothing(step: str, states, tmp_path: Path, open_run):
    """Readers see every row once before anything is repaired; resuming gives the very file that would have been."""
    _, after, suffix = states
    run = tmp_path / "run"
    crash(step, states, run)
    expected = read_table(after)
    assert read_table(run).equals(expected)
    with open_run(format=suffix) as resumed:
        assert resumed.rows == 3
        assert resumed.existing(["rollout_id"]).num_rows == 3
    assert [p.name for p in sorted((run / "rollouts").iterdir())] == [PART[suffix]]
    assert (run / "rollouts" / PART[suffix]).read_bytes() == (after / "rollouts" / PART[suffix]).read_bytes()
    assert read_run_json(run)["files"] == read_run_json(after)["files"]


def test_resuming_in_another_format_doubles_nothing(states, tmp_path: Path, open_run):
    """A part that was renamed but not named gives way when the segment is sealed in the other format."""
    _, after, suffix = states
    run = tmp_path / "run"
    crash("renamed", states, run)
    other = {"parquet": "jsonl", "jsonl": "parquet"}[suffix]
    open_run(format=other).close()
    assert [p.name for p in (run / "rollouts").iterdir()] == [PART[other]]
    assert read_table(run).equals(read_table(after))


@pytest.mark.parametrize("states", ["parquet"], indirect=True)
def test_a_part_without_lines_that_run_json_does_not_name_is_refused(states, tmp_path: Path, open_run):
    """No crash leaves one: it is of another run, whose rows must not become this one's."""
    before, _, suffix = states
    run = tmp_path / "run"
    crash("dropped", states, run)
    shutil.copy(before / "run.json", run / "run.json")
    with pytest.raises(DataError, match="is not among the files of"):
        open_run(format=suffix)


def test_a_reader_that_was_overtaken_by_sealing_reads_the_part(states, tmp_path: Path):
    """Lines that were listed and then sealed away give the same rows from their part."""
    _, after, _ = states
    journal = Source(after / "rollouts" / PART["jsonl"], "segment")
    assert tables.read_source(journal, ROLLOUTS, None).equals(read_table(after))


def test_broken_lines_are_left_out_of_the_sealed_file(tmp_path: Path, open_run, interrupted, row):
    """A damaged line does not stop sealing; its bytes stay in the .torn file after the lines are gone."""
    interrupted(map(row, range(3)))
    journal = tmp_path / "run" / "rollouts" / "part-00000.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1].replace(b"completed", b"complexed") + lines[2] + b'{"rollout')
    with open_run() as run:
        assert [(r.offset, r.truncated) for r in run.repairs] == [
            (len(lines[0]), False),
            (sum(map(len, lines)), True),
        ]
        run.append(row(3))
    assert read_table(tmp_path / "run")["rollout_id"].to_pylist() == [f"{i:032x}" for i in (0, 2, 3)]
    assert sorted(p.name for p in journal.parent.iterdir()) == ["part-00000.jsonl.torn", "part-00000.parquet"]


def test_a_damaged_line_of_a_segment_that_stays_lines_is_named_by_every_reader(
    tmp_path: Path, open_run, interrupted, row
):
    """Good lines are not rewritten to take it out; run.json counts the good ones, and a segment that follows is another."""
    interrupted(map(row, range(3)), format="jsonl")
    segment = tmp_path / "run" / "rollouts" / "part-00000.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b"completed", b"complexed", 1))
    damaged = segment.read_bytes()
    with open_run(format="jsonl") as run:
        run.seal()
        run.append(row(3))
    assert segment.read_bytes() == damaged
    assert [(f["path"], f["rows"]) for f in read_run_json(tmp_path / "run")["files"]] == [
        ("rollouts/part-00000.jsonl", 2),
        ("rollouts/part-00001.jsonl", 1),
    ]
    with pytest.warns(DataWarning, match=r"1 damaged row left out \(line 1 at byte 0\)"):
        assert read_table(tmp_path / "run")["rollout_id"].to_pylist() == [f"{i:032x}" for i in (1, 2, 3)]


def test_a_fault_while_sealing_reaches_the_caller(tmp_path: Path, open_run, row, monkeypatch: pytest.MonkeyPatch):
    """A segment that cannot be sealed stops the run with the cause, and its rows stay lines."""

    def no_room(*_: object) -> int:
        raise StoreError.from_os(tmp_path, OSError(errno.ENOSPC, ""))

    monkeypatch.setattr(importlib.import_module("gymdata.store.run"), "write_batches", no_room)
    run = open_run(rows_per_file=2)
    for i in range(2):
        run.append(row(i))
    with pytest.raises(StoreError, match="No space left"):
        run.close()
    assert read_table(tmp_path / "run").num_rows == 2
    monkeypatch.undo()
    open_run().close()
    assert read_table(tmp_path / "run").num_rows == 2


def collect(folder: Path, rows_before_kill: int | None) -> int:
    """Append those of 60 rows that the run does not have yet; after so many the process is killed."""
    with Run.open(folder, identity={"model": "tiny"}, extent={}, operation={}, rows_per_file=7) as run:
        have = set(run.existing(["rollout_id"])["rollout_id"].to_pylist())
        rows = [make_row(i, n_turns=3) for i in range(60)]
        for count, row in enumerate((row for row in rows if row["rollout_id"] not in have), 1):
            run.append(row)
            if count == rows_before_kill:
                os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_process_killed_again_and_again_ends_with_the_same_table(tmp_path: Path, row):
    """SIGKILL while rows are appended and segments sealed, resumed each time: every row once, equal to a run that
    nobody killed."""
    run = tmp_path / "killed"
    with forks() as processes:
        for rows_before_kill in (1, 6, 7, 8, 13, 3, None):
            code = processes.start(collect, run, rows_before_kill).wait()
            assert code == (0 if rows_before_kill is None else -signal.SIGKILL)
    expected = build_table([row(i, n_turns=3) for i in range(60)], tmp_path)
    assert read_table(run).sort_by("rollout_id").equals(expected)
    assert sum(f["rows"] for f in read_run_json(run)["files"]) == 60
    assert not list((run / "rollouts").glob("*.torn"))


def build_table(rows, folder: Path):
    file = folder / "expected.jsonl"
    file.write_bytes(b"".join(encode(r) + b"\n" for r in rows))
    return read_table(file)


def test_row_groups_are_cut_by_tokens(tmp_path: Path, row):
    """No row group holds more than four bytes for each of the most tokens, unless one row alone does; no row is lost at a
    border."""
    table = build_table([row(i, n_turns=1 + (i % 5 == 4) * 9) for i in range(12)], tmp_path)
    sink = ParquetSink(tmp_path / "x.parquet", ROLLOUTS, ROLLOUTS.arrow)
    assert sink.group_bytes == 4 * 4_000_000
    sink.group_bytes = 4 * 500
    for batch in table.to_batches(max_chunksize=5):
        sink.write(batch)
    sink.close()
    file = pq.ParquetFile(tmp_path / "x.parquet")
    groups = [file.read_row_group(g) for g in range(file.num_row_groups)]
    for group in groups:
        tokens = sum(group["n_context_tokens"].to_pylist()) + sum(group["n_generated_tokens"].to_pylist())
        assert tokens <= 500 or group.num_rows == 1
    assert sum(g.num_rows for g in groups) == 12
    assert 1 < len(groups) < 12
    assert read_table(tmp_path / "x.parquet").equals(table)


def test_large_segments_are_parsed_in_pieces(tmp_path: Path, row, monkeypatch: pytest.MonkeyPatch):
    """Reading JSON in many small pieces gives the rows that reading it at once gives."""
    table = build_table([row(i) for i in range(9)], tmp_path)
    monkeypatch.setattr(tables, "PARSE_BYTES", 1)
    batches = list(scan_batches(tmp_path / "expected.jsonl"))
    assert [b.num_rows for b in batches] == [1] * 9
    assert read_table(tmp_path / "expected.jsonl").equals(table)
