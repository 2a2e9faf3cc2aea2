"""Every parser of rows against a kept corpus of hostile lines, and against mutations of them.

``corpus/`` holds a file for each format: its first line is good, the others are what once broke a parser of ours or could.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.collect.tasks import TaskFile
from gymdata.errors import GymdataError
from gymdata.interop.formats import format_named
from gymdata.interop.run import import_rollouts
from gymdata.rollouts.schema import PAIRS, TABLES
from gymdata.store import read_table
from gymdata.store.lines import encode_any
from gymdata.validate.run import validate
from tests.interop.trajectories import copy_and_last, places
from tests.rollout_files import rollout, two_turns, write_run
from tests.validate.generate import native_rows, write_native

CORPUS = Path(__file__).parent / "corpus"
IMPORTED = ["nemo-gym", "atif", "nat-trajectories", "nat-dpo"]
_SETTINGS = settings(max_examples=30, deadline=None)


def lines_of(name: str) -> list[bytes]:
    return (CORPUS / f"{name}.jsonl").read_bytes().splitlines()


def imported(name: str, lines: list[bytes], folder: Path) -> int:
    """Import the lines; every one must be a row, or be named. Returns how many were rejected."""
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    done = import_rollouts(folder / "a.jsonl", folder / "run", source=name, overwrite=True)
    assert done.rows_in == done.rollouts + done.pairs + done.rejected == len(lines)
    told = folder / "run" / "rejected.jsonl"
    rejected = [json.loads(line) for line in told.read_text().splitlines()] if told.is_file() else []
    assert len(rejected) == done.rejected
    assert all(bad["code"] and bad["reason"] and 1 <= bad["line"] <= len(lines) for bad in rejected)
    table = TABLES[format_named(name).table]
    assert read_table(folder / "run", table).num_rows == done.rollouts + done.pairs
    return done.rejected


@pytest.mark.parametrize("name", IMPORTED)
def test_the_corpus_is_imported_or_named(name: str, tmp_path: Path) -> None:
    """Imported and rejected rows are the rows given; what was imported is validated and exported without a crash."""
    rejected = imported(name, lines_of(name), tmp_path)
    assert 0 < rejected < len(lines_of(name))
    validate(tmp_path / "run")
    formats = ["nat-dpo", "nat-dpo-items"] if name == "nat-dpo" else ["nemo-gym", "nat-trajectories", "atif", "openai"]
    for kind in formats:
        try:
            gymdata.export(tmp_path / "run", tmp_path / f"{kind}.jsonl", kind, overwrite=True)
        except GymdataError as error:
            # It need not raise: a row may be unwritable in one format, or its numbers be refused in all.
            assert re.search(r"cannot be written as|^(T206|L30[123]): ", error.message)


@pytest.mark.parametrize("name", IMPORTED)
def test_the_corpus_as_a_file_to_validate(name: str, tmp_path: Path) -> None:
    """validate names every bad row of NeMo Gym's, and refuses the others with the command that imports them."""
    (tmp_path / "a.jsonl").write_bytes((CORPUS / f"{name}.jsonl").read_bytes())
    if name == "nemo-gym":
        report = validate(tmp_path / "a.jsonl")
        bad = {v.row for v in report.violations if v.code.startswith("S1")}
        assert report.rollouts + len(bad) == len(lines_of(name))
    else:
        with pytest.raises(GymdataError, match="import it first"):
            validate(tmp_path / "a.jsonl")


def tasks_or_named(lines: list[bytes], folder: Path) -> int:
    (folder / "t.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    tasks = TaskFile(folder / "t.jsonl", skip_bad_rows=True)
    assert len(list(tasks)) + tasks.skipped == len(lines)
    return tasks.skipped


def test_the_corpus_of_messages(tmp_path: Path) -> None:
    """Chat messages in task files are tasks, or are skipped and counted."""
    assert 0 < tasks_or_named(lines_of("openai"), tmp_path) < len(lines_of("openai"))


ODD: list[Any] = [
    None, True, -1, 0.5, 2**31, 2**70, float("nan"), -1e308, "", "x", "\ud800", "\x1b[2J", "{not json", [], {}, [[]], [5],
    {"a": None}, "human",
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, line: bytes) -> bytes:
    """One line with a value changed, taken out or nested deeply, or with its bytes cut, repeated or changed."""
    if draw(st.booleans()):
        at = draw(st.integers(1, len(line) - 2))
        to = draw(st.integers(at, min(at + 20, len(line) - 1)))
        new = draw(st.sampled_from([b"", line[at:to] * 2, b"\xff", b"\x00", b'"', b"[", b"}", b"NaN", b"\\ud800"]))
        return line[:at] + new + line[to:]
    value = json.loads(line)
    path = draw(st.sampled_from(sorted(places(value), key=str)))
    made, holder = copy_and_last(value, path)
    if draw(st.booleans()) and isinstance(holder, dict):
        del holder[path[-1]]
        return json.dumps(made).encode()
    holder[path[-1]] = draw(st.sampled_from([*ODD, "@deep@"]))
    depth = draw(st.sampled_from([100, 500, 1500]))
    return json.dumps(made).replace('"@deep@"', "[" * depth + "]" * depth).encode()


def _one_row(line: bytes) -> bool:
    """Not a list or collection, which is several rows, and no blank line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return b"\n" not in line and bool(line.strip())
    return not isinstance(value, list) and not (isinstance(value, dict) and "trajectories" in value)


@pytest.mark.parametrize("name", IMPORTED)
@_SETTINGS
@given(data=st.data())
def test_mutated_rows_are_imported_or_named(name: str, data: st.DataObject) -> None:
    """Whatever became of some lines, each is a row or is named, and the good ones around them are imported."""
    good = lines_of(name)[0]
    bad = data.draw(st.lists(mutated(good).filter(_one_row), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as place:
        assert imported(name, [good, *bad, good], Path(place)) <= len(bad)


@_SETTINGS
@given(data=st.data())
def test_mutated_messages_are_tasks_or_skipped(data: st.DataObject) -> None:
    """The same for chat messages in task files."""
    good = data.draw(st.sampled_from(lines_of("openai")[:2]))
    bad = data.draw(st.lists(mutated(good).filter(_one_row), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as place:
        assert tasks_or_named([good, *bad], Path(place)) <= len(bad)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A line of our own rollouts, and one of our pairs."""
    folder = tmp_path_factory.mktemp("ours")
    rollouts = write_native(folder, native_rows(n=1), "jsonl").read_bytes().splitlines()[0]
    run = write_run(folder / "run", [rollout("t", n, float(n), two_turns(5, 20 + n)) for n in range(2)])
    gymdata.pairs(run, output=folder / "pairs.parquet")
    row = read_table(folder / "pairs.parquet", PAIRS).to_pylist()[0]
    return {"rollouts": rollouts, "pairs": encode_any(row)}


@pytest.mark.parametrize("name", ["rollouts", "pairs"])
@_SETTINGS
@given(data=st.data())
def test_mutated_rows_of_ours_are_read_or_named(name: str, ours: dict[str, bytes], data: st.DataObject) -> None:
    """validate of our own JSON lines reads every row or names it; nothing but errors of ours leaves it."""
    bad = data.draw(st.lists(mutated(ours[name]).filter(_one_row), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"{name}.jsonl"
        path.write_bytes(b"\n".join([ours[name], *bad]) + b"\n")
        try:
            report = validate(path)
        except GymdataError:
            return
        named = {v.row for v in report.violations if v.code.startswith("S1")}
        assert report.rollouts <= len(bad) + 1
        assert report.rollouts + len(named) >= len(bad) + 1 or name == "pairs"
