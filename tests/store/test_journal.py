"""The journal: framing, damage anywhere, repair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from gymdata.errors import StoreError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.journal import Journal, frame, read_rows, repair, scan, unframe
from gymdata.store.lines import encode
from gymdata.store.reading import DataWarning
from tests.kills import full_disk


@pytest.fixture
def journal(tmp_path: Path, row) -> Path:
    """Three rows."""
    path = tmp_path / "00000.journal"
    path.write_bytes(b"".join(frame(encode(row(i, n_turns=1))) for i in range(3)))
    return path


def ids(path: Path) -> list[str]:
    return [r["rollout_id"] for _, r, _ in read_rows(path)]


def test_a_line_is_json_tab_crc_newline():
    """Anybody can check a journal with a JSON parser and a crc32."""
    assert frame(b'{"a":1}') == b'{"a":1}\t561bacaf\n'
    assert unframe(b'{"a":1}\t561bacaf') == b'{"a":1}'
    assert unframe(b'{"a":2}\t561bacaf') is None
    assert unframe(b"") is None


def test_a_cut_at_every_byte_loses_at_most_the_torn_row(journal: Path, tmp_path: Path):
    """However many bytes are left, the rows whose lines are whole come back identical, and only those."""
    whole = journal.read_bytes()
    bodies = [unframe(line) for line in whole.splitlines()]
    cut = tmp_path / "cut.journal"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        # A line that lacks only its newline is whole.
        expected = whole.count(b"\n", 0, size) + (whole[size : size + 1] == b"\n")
        assert [line.body for line in scan(cut) if line.body is not None] == bodies[:expected]


def test_repair_after_a_cut_at_every_byte_leaves_whole_lines(tmp_path: Path):
    """Wherever a journal was cut, repair keeps every whole line as it was, puts the rest aside once, and says where."""
    lines = [frame(b'{"a":%d}' % i) for i in range(3)]
    whole = b"".join(lines)
    for size in range(len(whole) + 1):
        cut = tmp_path / str(size) / "00000.journal"
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
    record = orjson.loads(journal.with_name("00000.journal.torn").read_bytes())
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


def test_a_row_whose_line_was_not_ended_stays_a_line_of_its_own(journal: Path):
    """Also in a journal with a damaged row: the next row does not become a part of its line."""
    content = journal.read_bytes()
    journal.write_bytes(b"?" + content[1:-1])
    rows, _ = repair(journal)
    added = Journal(journal, rows)
    added.append(frame(b'{"rollout_id":"next","turns":[]}'))
    added.close()
    with pytest.warns(DataWarning, match="1 damaged row left out"):
        assert ids(journal) == [f"{1:032x}", f"{2:032x}", "next"]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, rows: int):
    """When the disk takes a part of a line and then no more, the part is taken back; the error says what to do, and that
    earlier rows are safe, if there are any; the next row that fits is written."""
    line = frame(b"{}")
    journal = Journal(tmp_path / "00000.journal")
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
        assert (run.repairs, run.journal_rows) == ([], taken)
        run.append(row(taken))
    assert read_table(small_disk / "run", ROLLOUTS).num_rows == taken + 1


def test_rows_parse_the_same_with_and_without_simdjson(tmp_path: Path, row, monkeypatch: pytest.MonkeyPatch):
    """Empty lists, numbers that are not finite, and rows without turns build the same table either way."""
    rows = [row(0), row(1, n_turns=0), row(2), row(3)]
    rows[2]["turns"][0]["generation_log_probs"][1] = -np.inf
    rows[3]["turns"][0] |= {
        "generation_token_ids": np.zeros(0, np.int32),
        "generation_log_probs": np.zeros(0, np.float32),
    }
    rows[3]["turns"][1]["top_log_probs"] = [[{"id": 3, "log_prob": np.float32(-0.1)}], []]
    journal = tmp_path / "00000.journal"
    journal.write_bytes(b"".join(frame(encode(r)) for r in rows))
    tables = []
    for missing in (False, True):
        if missing:
            monkeypatch.setitem(sys.modules, "simdjson", None)
        tables.append(read_table(journal))
    assert tables[0].equals(tables[1])
    assert tables[0].to_pylist()[2]["turns"][0]["generation_log_probs"][1] == -np.inf
