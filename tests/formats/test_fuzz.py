"""Every parser of rows against a kept corpus of hostile lines; tasks and our own rows against mutations too.

``corpus/`` holds a file for each format: its first line is good, the others are what once broke a parser of ours or could.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.commands.collect.tasks import TaskFile
from gymdata.commands.import_export.run import import_rollouts
from gymdata.commands.validate.run import validate
from gymdata.errors import GymdataError
from gymdata.formats import format_named
from gymdata.rollouts.schema import PAIRS, TABLES
from gymdata.store import read_table
from gymdata.store.lines import encode
from tests.formats.trajectories import lines, mutated
from tests.rollout_files import rollout, two_turns, write_run
from tests.validate.generate import native_rows, write_native

CORPUS = Path(__file__).parent / "corpus"
IMPORTED = ["nemo-gym", "atif", "nat-trajectories", "nat-dpo"]
_SETTINGS = settings(max_examples=30, deadline=None)


def lines_of(name: str) -> list[bytes]:
    return (CORPUS / f"{name}.jsonl").read_bytes().splitlines()


@pytest.mark.filterwarnings("ignore:.*token ids in the")
@pytest.mark.parametrize("name", IMPORTED)
def test_the_corpus_is_imported_or_named(name: str, tmp_path: Path) -> None:
    """Imported and rejected rows are the rows given; what was imported is validated and exported without a crash."""
    (tmp_path / "a.jsonl").write_bytes((CORPUS / f"{name}.jsonl").read_bytes())
    done = import_rollouts(tmp_path / "a.jsonl", tmp_path / "run", source=name)
    assert done.rows_in == done.rollouts + done.pairs + done.rejected == len(lines_of(name))
    assert 0 < done.rejected < done.rows_in
    told = lines(tmp_path / "run" / "rejected.jsonl")
    assert len(told) == done.rejected
    assert all(bad["code"] and bad["reason"] and 1 <= bad["line"] <= done.rows_in for bad in told)
    table = TABLES[format_named(name).table]
    assert read_table(tmp_path / "run", table).num_rows == done.rollouts + done.pairs
    validate(tmp_path / "run")
    formats = ["nat-dpo", "nat-dpo-items"] if name == "nat-dpo" else ["nemo-gym", "nat-trajectories", "atif", "openai"]
    for kind in formats:
        try:
            gymdata.export(tmp_path / "run", tmp_path / f"{kind}.jsonl", kind, overwrite=True)
        except GymdataError as error:
            # It need not raise: a row may be unwritable in one format, or its numbers, or that it is there twice, be
            # refused in all.
            assert re.search(r"cannot be written as|^(T206|L30[123]|D701): ", error.message)


def test_the_corpus_as_a_file_to_validate(tmp_path: Path) -> None:
    """validate names every bad row of the format that it reads as it is."""
    name = "nemo-gym"
    (tmp_path / "a.jsonl").write_bytes((CORPUS / f"{name}.jsonl").read_bytes())
    report = validate(tmp_path / "a.jsonl")
    # A format may ask for a reward, whose lack is no S1.
    bad = {v.row for v in report.violations if v.code.startswith("S1") or (v.code == "R502" and v.detail)}
    assert bad
    assert report.rollouts + len(bad) == len(lines_of(name))


def tasks_or_named(rows: list[bytes], folder: Path) -> int:
    (folder / "t.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    tasks = TaskFile(folder / "t.jsonl", skip_bad_rows=True)
    assert len(list(tasks)) + tasks.skipped == len(rows)
    return tasks.skipped


def test_the_corpus_of_messages(tmp_path: Path) -> None:
    """Chat messages in task files are tasks, or are skipped and counted."""
    assert 0 < tasks_or_named(lines_of("openai"), tmp_path) < len(lines_of("openai"))


@_SETTINGS
@given(data=st.data())
def test_mutated_messages_are_tasks_or_skipped(data: st.DataObject) -> None:
    """Whatever became of some lines of a task file, each is a task or is skipped and counted."""
    good = data.draw(st.sampled_from(lines_of("openai")[:2]))
    bad = data.draw(st.lists(mutated(good), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as place:
        assert tasks_or_named([good, *bad], Path(place)) <= len(bad)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A line of our own rollouts, and one of our pairs."""
    folder = tmp_path_factory.mktemp("ours")
    rollouts = write_native(folder, native_rows(n=1), "jsonl").read_bytes().splitlines()[0]
    run = write_run(folder / "run", [rollout("t", n, float(n), two_turns(5, 20 + n)) for n in range(2)])
    gymdata.pairs(run, output=folder / "pairs")
    row = read_table(folder / "pairs", PAIRS).to_pylist()[0]
    return {"rollouts": rollouts, "pairs": encode(row)}


@pytest.mark.parametrize("name", ["rollouts", "pairs"])
@_SETTINGS
@given(data=st.data())
def test_mutated_rows_of_ours_are_read_or_named(name: str, ours: dict[str, bytes], data: st.DataObject) -> None:
    """validate of our own JSON lines reads every row or names it; nothing but errors of ours leaves it."""
    bad = data.draw(st.lists(mutated(ours[name]), min_size=1, max_size=3))
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
