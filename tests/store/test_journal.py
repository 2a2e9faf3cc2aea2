"""Lines with checksums: their form, damage anywhere, repair."""

from __future__ import annotations

import json
import subprocess
import zlib
from pathlib import Path

import orjson
import pytest

from gymdata.errors import StoreError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.journal import Journal, body_of, line_of, repair, scan
from gymdata.store.lines import encode
from gymdata.store.paths import Source
from gymdata.store.reading import DataWarning
from gymdata.store.tables import scan_source
from tests.kills import full_disk


@pytest.fixture
def journal(tmp_path: Path, row) -> Path:
    """Three rows."""
    path = tmp_path / "rollouts" / "part-00000.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"".join(line_of(encode(row(i, n_turns=1))) for i in range(3)))
    return path


def ids(path: Path) -> list[str]:
    batches = scan_source(Source(path, "segment"), ROLLOUTS, ["rollout_id"])
    return [name for batch in batches for name in batch["rollout_id"].to_pylist()]


def test_a_line_is_an_object_whose_last_key_is_its_checksum():
    """Anybody can check a line with a crc32 of what stands before the key, and read it with a JSON parser."""
    assert line_of(b'{"a":1}') == b'{"a":1,"crc32":"%08x"}\n' % zlib.crc32(b'{"a":1')
    assert list(json.loads(line_of(b'{"a":1}'))) == ["a", "crc32"]
    assert body_of(line_of(b'{"a":1}')[:-1]) == b'{"a":1}'
    assert body_of(line_of(b'{"a":1}')[:-1].replace(b"1", b"2", 1)) is None
    assert body_of(b'{"a":1}') is None
    assert body_of(b"") is None


def test_lines_of_a_run_are_rows_elsewhere_and_foreign_lines_need_no_checksum(journal: Path, tmp_path: Path):
    """A copy of a segment is checked where it has checksums; rows of other programs are read as they are."""
    first, second, third = journal.read_bytes().splitlines(keepends=True)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(first + (body_of(second[:-1]) or b"") + b"\n" + third)
    assert read_table(copy).equals(read_table(journal))
    copy.write_bytes(first + second.replace(b"completed", b"truncated") + third)
    with pytest.warns(DataWarning, match=r"1 damaged row left out \(line 2\)"):
        assert read_table(copy)["rollout_id"].to_pylist() == [f"{0:032x}", f"{2:032x}"]


def test_a_cut_at_every_byte_loses_at_most_the_torn_row(journal: Path, tmp_path: Path):
    """However many bytes are left, the rows whose lines are whole come back identical, and only those."""
    whole = journal.read_bytes()
    bodies = [body_of(line) for line in whole.splitlines()]
    cut = tmp_path / "cut.jsonl"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        # A line that lacks only its newline is whole.
        expected = whole.count(b"\n", 0, size) + (whole[size : size + 1] == b"\n")
        assert [line.body for line in scan(cut) if line.body is not None] == bodies[:expected]


def test_repair_after_a_cut_at_every_byte_leaves_whole_lines(tmp_path: Path):
    """Wherever a journal was cut, repair keeps every whole line as it was, puts the rest aside once, and says where."""
    lines = [line_of(b'{"a":%d}' % i) for i in range(3)]
    whole = b"".join(lines)
    for size in range(len(whole) + 1):
        cut = tmp_path / str(size) / "part-00000.jsonl"
        cut.parent.mkdir()
        cut.write_bytes(whole[:size])
        expected = whole.count(b"\n", 0, size) + (whole[size : size + 1] == b"\n")
        kept = b"".join(lines[:expected])
        rows, repairs = repair(cut)
        assert rows == expected
        assert cut.read_bytes() == kept
        torn = size - len(kept)
        assert [(r.offset, r.length, r.truncated) for r in repairs] == ([(size - torn, torn, True)] if torn > 0 else [])
        assert repair(cut) == (expected, [])


def test_one_changed_byte_loses_only_its_line(journal: Path):
    """A flipped byte anywhere in the middle line leaves its neighbours untouched, and is reported once."""
    whole = journal.read_bytes()
    first, middle, last = whole.splitlines(keepends=True)
    for at in range(len(first), len(first) + len(middle) - 1, 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        journal.write_bytes(damaged)
        with pytest.warns(DataWarning, match=rf"1 damaged row left out \(line 2 at byte {len(first)}\)"):
            assert ids(journal) == [f"{0:032x}", f"{2:032x}"]
    rows, repairs = repair(journal)
    assert (rows, [r.offset for r in repairs]) == (2, [len(first)])
    assert journal.read_bytes() == bytes(damaged), "good rows are never rewritten"
    record = orjson.loads(journal.with_name("part-00000.jsonl.torn").read_bytes())
    assert (record["offset"], record["length"]) == (len(first), len(middle) - 1)
    assert repair(journal) == (2, [])
    assert last.endswith(b"\n")


def test_a_damaged_line_where_a_torn_one_was_cut_off_is_reported(journal: Path):
    """The next row begins where the torn tail began; it is another line, and is not taken for what was reported before."""
    content = journal.read_bytes()
    first = len(content.splitlines(keepends=True)[0])
    journal.write_bytes(content[: first + 20])
    repair(journal)
    journal.write_bytes(content[:first] + b"?" + content[first + 1 :])
    rows, repairs = repair(journal)
    assert (rows, [(r.offset, r.truncated) for r in repairs]) == (2, [(first, False)])
    assert repair(journal) == (2, [])


def test_a_row_whose_line_was_not_ended_stays_a_line_of_its_own(journal: Path, row):
    """Also in a journal with a damaged row: the next row does not become a part of its line."""
    content = journal.read_bytes()
    journal.write_bytes(b"?" + content[1:-1])
    rows, _ = repair(journal)
    added = Journal(journal, rows)
    added.append(line_of(encode(row(3, rollout_id="next"))))
    added.close()
    with pytest.warns(DataWarning, match="1 damaged row left out"):
        assert ids(journal) == [f"{1:032x}", f"{2:032x}", "next"]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, rows: int):
    """When the disk takes a part of a line and then no more, the part is taken back; the error says what to do, and that
    earlier rows are safe, if there are any; the next row that fits is written."""
    line = line_of(b"{}")
    journal = Journal(tmp_path / "part-00000.jsonl")
    for _ in range(rows):
        journal.append(line)
    with full_disk(journal.size + 1), pytest.raises(StoreError, match="File too large") as caught:
        journal.append(line)
    assert caught.value.exit_code == 3
    assert ("rows journaled so far are safe" in str(caught.value)) == (rows == 1)
    assert journal.path.read_bytes() == line * rows
    journal.append(line)
    journal.close()
    assert journal.path.read_bytes() == line * (rows + 1)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 256 kB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_loses_no_row_that_was_taken(small_disk: Path, open_run, row):
    """Collecting onto a disk that fills up ends with a clear error; every row whose append returned is there, and the
    same run goes on once there is room."""
    taken = 0

    def fill() -> None:
        nonlocal taken
        with open_run(folder=small_disk / "run") as run:
            while True:
                run.append(row(taken, task="x" * 5000))
                taken += 1

    with pytest.raises(StoreError, match="could not be written"):
        fill()
    assert taken > 10
    assert read_table(small_disk / "run", ROLLOUTS).num_rows == taken
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    with open_run(folder=small_disk / "run") as run:
        assert (run.repairs, run.rows) == ([], taken)
        run.append(row(taken))
    assert read_table(small_disk / "run", ROLLOUTS).num_rows == taken + 1
