"""A power cut at any moment of a run or of an output, with any of the changes that were not synced: nothing that was kept is
lost, nothing is doubled or made up, and the same command finishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.store import Run, StageOutput, journal, read_run_json, read_table, run_json, stage_output
from gymdata.store.journal import Journal
from gymdata.store.lock import is_held
from gymdata.store.run_json import state_left
from gymdata.store.stage_output import single_file
from tests.crash_states import Recording, plant, recording, wrong_states
from tests.store.conftest import make_row

ROWS = [make_row(n, n_turns=1) for n in range(5)]
IDS = [row["rollout_id"] for row in ROWS]


def open_run(folder: Path, **settings: Any) -> Run:
    given: dict[str, Any] = {"rows_per_file": 2, "fsync_interval_s": 0, "run_id": "run"} | settings
    return Run.open(folder, identity={"model": "tiny"}, extent={"num_rollouts": 5}, operation={}, **given)


def record_a_run(folder: Path, **settings: Any) -> Recording:
    """A run of five rows and a failure, in parts of two; each row is promised when its append returns."""
    folder.parent.mkdir(exist_ok=True)
    with recording(folder.parent, lambda: is_held(folder)) as made, open_run(folder, **settings) as run:
        for row in ROWS:
            run.append(row)
            if settings.get("fsync_interval_s", 0) == 0:
                made.promise(row["rollout_id"])
        run.fail({"kind": "engine", "task_id": "task-9"})
        run.close()
        made.promise("finished")
    return made


def ids_of(folder: Path) -> list[str]:
    return list(read_table(folder, ROLLOUTS, ["rollout_id"])["rollout_id"].to_pylist())


def faults_of_run(folder: Path, promises: list[Any], whole: pa.Table, **settings: Any) -> str | None:
    """What is wrong with the files of a run after a power cut, for a reader and for the same command; None if nothing."""
    kept = [promise for promise in promises if promise in IDS]
    finds = [lambda: ids_of(folder)] if (folder / "run.json").exists() else []
    if kept and not finds:
        return "run.json is gone"
    with open_run(folder, **settings) as run:
        finds.append(lambda: run.existing(["rollout_id"])["rollout_id"].to_pylist())
        for find in finds:
            ids = find()
            if len(set(ids)) < len(ids) or not set(kept) <= set(ids) <= set(IDS):
                return f"got rollouts {[IDS.index(i) if i in IDS else i for i in ids]}, kept were {len(kept)}"
        failures = run.failures()
        for row in ROWS:
            if row["rollout_id"] not in ids:
                run.append(row)
    if len(failures) > 1 or ("finished" in promises and not failures):
        return f"{len(failures)} failures"
    if not read_table(folder).sort_by("rollout_id").equals(whole):
        return "rows are not what was appended"
    facts = read_run_json(folder)
    names = {path.name for path in (folder / "rollouts").iterdir() if path.suffix != ".torn"}
    if names != {Path(file["path"]).name for file in facts["files"]} or state_left(facts) != "complete":
        return f"it ends as {state_left(facts)} with {sorted(names)}"
    return None


def wrong_of_run(folder: Path, **settings: Any) -> tuple[int, list[str]]:
    """States tried and what is wrong, of a run in ``folder``; also what was written while its lock was not held."""
    run = folder / "work" / "run"
    made = record_a_run(run, **settings)
    whole = read_table(run).sort_by("rollout_id")
    tried, wrong = wrong_states(
        made, folder / "left", lambda left, promises: faults_of_run(left / "run", promises, whole, **settings)
    )
    # The folder is made before it can be locked.
    if unlocked := made.unlocked - {"run", "lock"}:
        wrong.append(f"written without the lock: {sorted(unlocked)}")
    return tried, wrong


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"format": "jsonl"}, id="jsonl"), pytest.param({"fsync_interval_s": 3600}, id="interval")],
)
def test_a_run_loses_no_row_that_was_synced(settings: dict[str, Any], tmp_path: Path) -> None:
    """Every state that a power cut can leave of a run of three parts: for a reader and for the same command every row that
    was promised is there once, and the run ends as if nothing had happened."""
    tried, wrong = wrong_of_run(tmp_path, **settings)
    assert wrong == []
    assert tried > 50


def faults_of_restart(folder: Path, whole: pa.Table) -> str | None:
    """What is wrong where a run is begun again with these files; None if nothing."""
    with open_run(folder, overwrite=True) as run:
        for row in ROWS:
            run.append(row)
    return None if read_table(folder).equals(whole) else "rows are not what was appended"


def test_a_run_can_be_begun_again_whatever_is_left_of_the_first(tmp_path: Path) -> None:
    """A power cut while --overwrite removes the files of a run, or after, leaves one that can be overwritten."""
    folder = tmp_path / "work" / "run"
    folder.parent.mkdir()
    record_a_run(folder)
    whole = read_table(folder)
    with recording(folder.parent) as made, open_run(folder, overwrite=True) as run:
        run.append(ROWS[0])
    tried, wrong = wrong_states(made, tmp_path / "left", lambda left, _: faults_of_restart(left / "run", whole))
    assert wrong == []
    assert tried > 30


def write_scores(folder: Path, value: float) -> None:
    """An output of one file in the place of another."""
    row = {"rollout_id": "r", "name": "s", "value": value, "status": "scored", "source": "x", "run_id": "run"}
    with StageOutput(folder, "score", overwrite=True) as output:
        output.table("scores.parquet", pa.Table.from_pylist([row], schema=SCORES.schema), SCORES)
        output.finish({})


def scores_in(folder: Path) -> list[float]:
    return list(read_table(folder, SCORES)["value"].to_pylist())


def faults_of_output(out: Path, promises: list[Any], replaced: bool) -> str | None:
    """What is wrong with the place of an output after a power cut; None if nothing."""
    old = out.with_name(f".{out.name}.tmp") / "old"
    there = scores_in(out) if (out / "run.json").exists() else []
    if there not in ([1.0], [2.0]) and not (not there and (not replaced or scores_in(old) == [1.0])):
        return f"a reader finds {there}"
    if promises and there != [2.0]:
        return f"it was finished, and there is {there}"
    write_scores(out, 2.0)
    if scores_in(out) != [2.0] or [path.name for path in out.parent.iterdir()] != ["out"]:
        return f"repeated, it leaves {sorted(str(path) for path in out.parent.rglob('*'))}"
    if replaced and (out / "notes.txt").read_text() != "mine":
        return "what others put there is gone"
    return None


def wrong_of_output(folder: Path, *, replaced: bool) -> tuple[int, list[str]]:
    """States tried and what is wrong, of an output in ``folder`` that is new or takes the place of another."""
    out = folder / "work" / "out"
    out.parent.mkdir()
    if replaced:
        write_scores(out, 1.0)
        (out / "notes.txt").write_text("mine")
    with recording(out.parent) as made:
        write_scores(out, 2.0)
        made.promise("finished")
    return wrong_states(made, folder / "left", lambda left, p: faults_of_output(left / "out", p, replaced))


def faults_of_file(file: Path, promises: list[Any]) -> str | None:
    there = file.read_bytes() if file.exists() else b""
    if there not in (b"old", b"new") or (promises and there != b"new"):
        return f"a reader finds {there!r}"
    with single_file(file, overwrite=True) as temporary:
        temporary.write_bytes(b"new")
    names = [path.name for path in file.parent.iterdir()]
    return None if file.read_bytes() == b"new" and names == [file.name] else f"repeated, it leaves {names}"


def test_a_single_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """A reader finds one of them whole, and the same command leaves the new one alone."""
    file = tmp_path / "work" / "out.html"
    file.parent.mkdir()
    file.write_bytes(b"old")
    with recording(file.parent) as made:
        with single_file(file, overwrite=True) as temporary:
            temporary.write_bytes(b"new")
        made.promise("finished")
    tried, wrong = wrong_states(made, tmp_path / "left", lambda left, p: faults_of_file(left / file.name, p))
    assert wrong == []
    assert tried > 5


@pytest.mark.parametrize("replaced", [False, True], ids=["new", "replaced"])
def test_an_output_is_the_old_one_or_the_new_one(replaced: bool, tmp_path: Path) -> None:
    """A reader finds one of them whole, or between the two nothing; what others put into the old one stays."""
    tried, wrong = wrong_of_output(tmp_path, replaced=replaced)
    assert wrong == []
    assert tried > 15


#: The folder gets its name before its run.json has its own.
SWAPPED = (
    """\
        write_run_json(self.new, {**facts, **ours})
        if self._at.exists():
            self._at.rename(self._hidden / "old")
        self.new.rename(self._at)
""",
    """\
        if self._at.exists():
            self._at.rename(self._hidden / "old")
        self.new.rename(self._at)
        write_run_json(self._at, {**facts, **ours})
""",
)
DROPPED_FIRST = (
    """\
            self._name_part(part, write_batches(rows_of_lines, part, ROLLOUTS, ROLLOUTS.arrow))
            drop_lines(segment)
""",
    """\
            rows = write_batches(rows_of_lines, part, ROLLOUTS, ROLLOUTS.arrow)
            drop_lines(segment)
            self._name_part(part, rows)
""",
)
#: The part that run.json names is a file whose content no sync has reached.
NOT_YET_SYNCED = """\
copy = part.with_suffix(".copy")
    copy.write_bytes(part.read_bytes())
    copy.rename(part)
    with self._facts_lock:"""
#: What is planted: the function, its text, the text in its place, and which recording finds it.
PLANTED = {
    "a row is not synced": (Journal, "sync", "os.fsync(self._fd)", "pass", wrong_of_run),
    "a name before its content": (run_json, "replacing", "sync(temporary)\n", "pass\n", wrong_of_run),
    "run.json before its part": (Run, "_name_part", "with self._facts_lock:", NOT_YET_SYNCED, wrong_of_run),
    "lines dropped before the part is named": (Run, "_seal", *DROPPED_FIRST, wrong_of_run),
    "a checksum is not checked": (
        journal, "body_of", "line[-_TAIL:] == b'%b%08x\"}' % (_KEY, zlib.crc32(content))", "line[-_TAIL:].startswith(_KEY)",
        wrong_of_run,
    ),
    "the lock goes first": (Run, "_end", "self._closed = True", "self._closed = True; self._lock.release()", wrong_of_run),
    "two renames swapped": (StageOutput, "finish", *SWAPPED, wrong_of_output),
    "what others put there is not kept": (
        stage_output, "settle", "path.rename(place / path.name)", "path.unlink()", wrong_of_output
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.full) for name in PLANTED])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that is left out, steps in another order, a checksum that is not looked at, a lock that is released early."""
    owner, name, before, after, wrong_of = PLANTED[fault]
    plant(monkeypatch, owner, name, before, after)
    given = {"replaced": True} if wrong_of is wrong_of_output else {}
    assert wrong_of(tmp_path, **given)[1]
