"""A run folder: resume, identity, lock, overwrite, failures."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest

from gymdata.commands.finetune.state import State
from gymdata.commands.pairs.run import pairs
from gymdata.errors import DataError, StoreError, UsageError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import Run, StageOutput, read_failures, read_run_json, read_table, write_run_json
from gymdata.store.reading import reading
from gymdata.store.run_json import state_left
from tests.kills import full_disk
from tests.rollout_files import write_table

FORK = multiprocessing.get_context("fork")


def test_rows_come_back_as_they_were_given(tmp_path: Path, open_run, row):
    """What is read equals what was appended, from the journal and from the sealed file, every type exact."""
    with open_run() as run:
        for i in range(3):
            run.append(row(i))
        journaled = read_table(tmp_path / "run")
        assert (run.rows, run.resumed) == (3, False)
    sealed = read_table(tmp_path / "run")
    assert sealed.equals(journaled)
    assert sealed.schema.equals(ROLLOUTS.arrow, check_metadata=True)
    got = sealed.to_pylist()[1]
    given = row(1)
    for name in ("rollout_id", "reward", "rewards", "n_context_tokens", "task", "started_at"):
        assert got[name] == given[name]
    assert got["messages"][1] == dict.fromkeys(got["messages"][1]) | {"role": "assistant", "content": "7", "turn": 0}
    for turn, expected in zip(got["turns"], given["turns"], strict=True):
        assert turn["digest"] == expected["digest"]
        assert turn["generation_token_ids"] == expected["generation_token_ids"].tolist()
        assert np.array(turn["generation_log_probs"], np.float32).tobytes() == (
            expected["generation_log_probs"].tobytes()
        )


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_segments_are_sealed_while_rows_come_in(tmp_path: Path, open_run, row, suffix: str):
    """--rows-per-file cuts files of that many rows; run.json names each with its rows, bytes and hash."""
    with open_run(rows_per_file=2, format=suffix) as run:
        for i in range(5):
            run.append(row(i))
    facts = read_run_json(tmp_path / "run")
    assert [(f["path"], f["rows"]) for f in facts["files"]] == [
        (f"rollouts/part-0000{k}.{suffix}", n) for k, n in enumerate((2, 2, 1))
    ]
    for file in facts["files"]:
        assert (tmp_path / "run" / file["path"]).stat().st_size == file["bytes"]
    assert sorted(p.name for p in (tmp_path / "run" / "rollouts").iterdir()) == [
        f"part-0000{k}.{suffix}" for k in range(3)
    ]
    assert read_table(tmp_path / "run")["rollout_id"].to_pylist() == [f"{i:032x}" for i in range(5)]


def test_a_part_that_was_changed_is_refused_to_who_resumes(tmp_path: Path, open_run, row):
    """What is saved is not what was sampled, unless that is allowed."""
    with open_run() as run:
        run.append(row(0))
    (part,) = (tmp_path / "run" / "rollouts").iterdir()
    write_table(read_table(part).take([0, 0]), part, ROLLOUTS)
    with open_run() as run, pytest.raises(DataError, match="differs from what"):
        run.existing(["rollout_id"])
    with reading(allow_changed=True, report=lambda _: None) as found, open_run() as run:
        assert run.existing(["rollout_id"]).num_rows == 2
    assert ["differs from what" in line for line in found.warnings] == [True]


def test_a_resumed_run_keeps_its_id_and_rows(tmp_path: Path, open_run, row):
    """Opening again with the same identity goes on: same run_id, all rows known, another attempt recorded."""
    with open_run(run_id="mine", operation={"concurrency": 1}) as run:
        run.append(row(0))
    with open_run(extent={"num_rollouts": 4}, operation={"concurrency": 8}) as run:
        assert (run.run_id, run.resumed, run.rows) == ("mine", True, 1)
        assert run.existing(["task_id", "rollout_index"]).to_pylist() == [{"task_id": "task-0", "rollout_index": 0}]
        run.append(row(1))
        assert run.existing(["rollout_index"]).num_rows == 2
    facts = read_run_json(tmp_path / "run")
    assert [a["operation"] for a in facts["attempts"]] == [{"concurrency": 1}, {"concurrency": 8}]
    assert [a["outcome"] for a in facts["attempts"]] == ["closed", "closed"]
    assert facts["extent"] == {"num_rollouts": 4}
    assert read_table(tmp_path / "run").num_rows == 2


def test_another_identity_is_refused_by_its_keys(open_run):
    """A run is resumed with the same settings or not at all; the error names each key with both values."""
    with open_run(identity={"temperature": 0.7, "environment": {"hash": "a"}, "limits": (1, 2)}) as run:
        run.fail({"kind": "engine"})
    with pytest.raises(StoreError, match=r"environment\.hash: run has 'a', now 'b'; temperature: run has 0.7, now 1.0"):
        open_run(identity={"temperature": 1.0, "environment": {"hash": "b"}, "limits": [1, 2]})
    with pytest.raises(StoreError, match="run_id: run has"):
        open_run(identity={"temperature": 0.7, "environment": {"hash": "a"}, "limits": [1, 2]}, run_id="other")
    open_run(identity={"temperature": 0.7, "environment": {"hash": "a"}, "limits": [1, 2]}).close()


def test_a_smaller_extent_takes_nothing_away(tmp_path: Path, open_run):
    """Asking for fewer rollouts than before leaves what the run covers as it was."""
    open_run(extent={"num_rollouts": 8, "tasks": 10}).close()
    open_run(extent={"num_rollouts": 2, "tasks": 12}).close()
    assert read_run_json(tmp_path / "run")["extent"] == {"num_rollouts": 8, "tasks": 12}


def test_a_run_of_a_newer_version_is_refused(tmp_path: Path, open_run):
    """Rows that this version cannot know are not appended to."""
    open_run().close()
    facts = read_run_json(tmp_path / "run")
    facts["schemas"]["rollouts"] = 99
    write_run_json(tmp_path / "run", facts)
    with pytest.raises(DataError, match="version 99 is newer"):
        open_run()


def hold(folder: Path, opened, ended) -> None:
    """Open the run, in a process of its own, until ``ended``."""
    with Run.open(folder, identity={"model": "tiny", "temperature": 0.7}, extent={}, operation={}):
        opened.set()
        ended.wait()


def test_the_second_writer_is_told_who_writes(tmp_path: Path, open_run):
    """One writer a run: another one, in this process too, gets the holder's pid at once; the lock goes with its holder, also
    with one that is killed."""
    with open_run(), pytest.raises(StoreError, match=rf"another process writes to this run \(pid {os.getpid()} "):
        open_run()
    opened, ended = FORK.Event(), FORK.Event()
    holder = FORK.Process(target=hold, args=(tmp_path / "run", opened, ended), daemon=True)
    holder.start()
    opened.wait()
    with pytest.raises(StoreError, match=f"pid {holder.pid}"):
        open_run()
    holder.kill()
    holder.join()
    open_run().close()


@pytest.mark.parametrize("there", [False, True])
def test_a_lock_on_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, open_run, there: bool) -> None:
    """Where not even the lock fits, a run, a finetuning and an output say so; nothing is left of what was made for it."""
    tuned = tmp_path / "tuned"
    if there:
        open_run().close()
        tuned.mkdir()
    before = sorted(tmp_path.rglob("*"))
    locked = [
        open_run,
        lambda: State.open(tuned, {}, {}),
        lambda: StageOutput(tmp_path / "made", "pairs").__enter__(),
    ]
    for lock in locked:
        with full_disk(), pytest.raises(StoreError, match=r"lock: could not be written: (.|\n)*free space") as error:
            lock()
        assert error.value.exit_code == 3
    assert sorted(tmp_path.rglob("*")) == before
    open_run().close()


def test_a_forked_child_does_not_hold_the_lock(open_run):
    """An engine process that was forked while the run was open and outlives it does not keep the run locked."""
    event = FORK.Event()
    run = open_run()
    child = FORK.Process(target=event.wait, daemon=True)
    child.start()
    run.close()
    try:
        open_run().close()
    finally:
        event.set()
        child.join()


@pytest.mark.parametrize("name", ["notes.txt", "rollouts"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_left_alone(tmp_path: Path, open_run, name: str, overwrite: bool):
    """A folder with content and without run.json is refused, and nothing is added to it or removed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    with pytest.raises(StoreError, match=r"is not empty, and no run\.json says what it holds"):
        open_run(overwrite=overwrite)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [name]


def test_a_row_that_is_journaled_is_appended_whatever_fails_after_it(
    tmp_path: Path, open_run, row, monkeypatch: pytest.MonkeyPatch
):
    """Its caller would append it again: what failed is raised by the next step, and by the end of the run."""

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    run = open_run(fsync_interval_s=0)
    run.append(row(0))
    monkeypatch.setattr(os, "fsync", broken)
    run.append(row(1))
    with pytest.raises(StoreError, match="Input/output error"):
        run.append(row(2))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="Input/output error"):
        run.close()
    assert read_table(tmp_path / "run").num_rows == 2


def test_overwrite_removes_only_what_gymdata_wrote(tmp_path: Path, open_run, row):
    """Rollouts and failures go; notes, checkpoints and whatever else stay."""
    folder = tmp_path / "run"
    with open_run(rows_per_file=1) as run:
        run.append(row(0))
        run.fail({"kind": "engine"})
    (folder / "train-dpo").mkdir()
    (folder / "train-dpo" / "model.safetensors").write_bytes(b"weights")
    (folder / "rollouts" / "part-of-my-notes.txt").write_text("mine")
    first = read_run_json(folder)["run_id"]
    with open_run(overwrite=True, identity={"model": "another"}) as run:
        assert (run.resumed, run.rows, run.failures()) == (False, 0, [])
        assert run.run_id != first
    left = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert left == ["lock", "rollouts/part-of-my-notes.txt", "run.json", "train-dpo/model.safetensors"]


@pytest.mark.parametrize("inside", ["pairs-best", ".judge-tiny.tmp"])
def test_overwrite_is_refused_where_something_was_made_from_the_rollouts(tmp_path: Path, open_run, row, inside: str):
    """Verdicts may have been paid for; also what a killed command left half replaced."""
    with open_run() as run:
        run.append(row(0))
    (tmp_path / "run" / inside).mkdir()
    settings = {"identity": {"model": "tiny", "temperature": 0.7}, "overwrite": True}
    with pytest.raises(StoreError, match=f"holds what was made from its rollouts: {re.escape(inside)}"):
        open_run(overwrite=True)
    with pytest.raises(StoreError, match="remove or move it first"):
        Run.check(tmp_path / "run", **settings)
    assert read_table(tmp_path / "run").num_rows == 1


def test_failures_are_kept_and_read_back(tmp_path: Path, open_run, row):
    """failures.jsonl keeps kind, place and the turns so far, over resumes; a torn last line is cut off and reported."""
    turns = row(0)["turns"]
    turns[0]["generation_log_probs"][0] = -np.inf
    with open_run() as run:
        run.fail({"task_id": "t", "rollout_index": 0, "kind": "engine", "attempt": 1, "turns": turns})
    file = tmp_path / "run" / "failures.jsonl"
    with file.open("ab") as handle:
        handle.write(b'{"task_id": "u", "ki')
    assert len(read_failures(tmp_path / "run")) == 1
    with open_run() as run:
        assert [str(r) for r in run.repairs] == [
            f"failures.jsonl: torn tail cut off at byte {file.stat().st_size} (20 bytes, kept in failures.jsonl.torn)"
        ]
        (failure,) = run.failures()
    assert failure["turns"][0]["generation_log_probs"][0] == "-Infinity"
    assert failure["turns"][1]["generation_token_ids"] == turns[1]["generation_token_ids"].tolist()


def test_a_failure_that_lacks_only_the_end_of_its_line_is_kept(tmp_path: Path, open_run):
    """A crash before the last byte of a record costs nothing: it is read before and after the run is opened again."""
    with open_run() as run:
        run.fail({"kind": "engine", "attempt": 0})
    file = tmp_path / "run" / "failures.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    with open_run() as run:
        assert run.repairs == []
        run.fail({"kind": "engine", "attempt": 1})
    assert [failure["attempt"] for failure in read_failures(tmp_path / "run")] == [0, 1]


def test_a_run_that_cannot_be_sealed_is_not_called_complete(tmp_path: Path, open_run, row):
    """A disk that was full for the last part: its rows are there, the attempt says what ended it, the same command seals."""
    run = open_run()
    run.append(row(0))
    with full_disk(5_000), pytest.raises(StoreError, match="part-00000"):
        run.close()
    facts = read_run_json(tmp_path / "run")
    assert facts["attempts"][-1]["outcome"].startswith("StoreError: ")
    assert state_left(facts) == "interrupted"
    assert read_table(tmp_path / "run").num_rows == 1
    open_run().close()
    facts = read_run_json(tmp_path / "run")
    assert (state_left(facts), facts["files"][0]["rows"]) == ("complete", 1)


def test_an_error_in_the_block_leaves_the_journal(tmp_path: Path, open_run, row):
    """A run left by an exception is not sealed; its rows stay readable, and the attempt says what ended it."""

    def collect() -> None:
        with open_run() as run:
            run.append(row(0))
            raise RuntimeError("engine fell over")

    with pytest.raises(RuntimeError, match="engine fell over"):
        collect()
    assert [p.name for p in (tmp_path / "run" / "rollouts").iterdir()] == ["part-00000.jsonl"]
    assert read_run_json(tmp_path / "run")["attempts"][0]["outcome"] == "RuntimeError: engine fell over"
    with open_run() as run:
        assert run.rows == 1


def test_notes_are_merged_into_run_json(tmp_path: Path, open_run):
    """Facts that become known later join run.json key by key; what the store keeps itself cannot be set."""
    with open_run(facts={"engine": {"name": "vllm"}}) as run:
        run.note(engine={"version": "1"}, counts={"rollouts": 1})
        with pytest.raises(ValueError, match="files"):
            run.note(files=[])
    facts = read_run_json(tmp_path / "run")
    assert facts["engine"] == {"name": "vllm", "version": "1"}
    assert facts["counts"] == {"rollouts": 1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": "1.0"}, "reward"),
        ({"policy_version": True}, "policy_version"),
        ({"rollout_id": None}, "rollout_id"),
        ({"surprise": 1}, "surprise"),
        ({"tools": []}, "tools"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages"),
        ({"rewards": [{"name": "a", "value": 1.0}, {"name": "a", "value": 2.0}]}, "rewards"),
        ({"turns": [{"parent": -1}]}, "turns"),
        ({"task": "lone \ud800"}, "'task'.* expected text in Unicode"),
        (
            {"messages": [{"role": "user", "content": "lone \udcff"}]},
            r"'messages\[0\].content'.* expected text in Unicode",
        ),
    ],
)
def test_a_row_that_could_not_be_sealed_is_refused(open_run, row, changes, field: str):
    """A malformed row is refused when it is appended, naming the field, and leaves nothing in the journal."""
    with open_run() as run:
        with pytest.raises(DataError, match=field):
            run.append(row(0, **changes))
        run.append(row(1))
        assert run.rows == 1


def test_wrong_settings_are_usage_errors(open_run, tmp_path: Path):
    """Formats and sizes that do not exist are refused before anything is written."""
    with pytest.raises(UsageError, match="did you mean 'jsonl'"):
        open_run(format="json")
    with pytest.raises(UsageError, match="rows per file"):
        open_run(rows_per_file=0)
    assert not (tmp_path / "run").exists()


def test_a_damaged_run_json_is_refused(tmp_path: Path, open_run):
    """One that does not parse is named."""
    open_run().close()
    (tmp_path / "run" / "run.json").write_text('{"run_id": ')
    with pytest.raises(DataError, match=r"run\.json: cannot be read: not JSON"):
        open_run()


def test_a_sealed_file_that_vanished_is_named(tmp_path: Path, open_run, row):
    """Rows that run.json promises and nobody has are not passed over in silence."""
    with open_run() as run:
        run.append(row(0))
    (tmp_path / "run" / "rollouts" / "part-00000.parquet").unlink()
    with pytest.raises(StoreError, match=r"part-00000\.parquet: is named in run\.json but not there"):
        open_run()


def test_a_closed_run_takes_no_rows(open_run, row):
    """Closing twice is harmless; appending after it is a programming error."""
    run = open_run()
    run.close()
    run.close()
    with pytest.raises(ValueError, match="closed"):
        run.append(row(0))


def test_a_run_that_holds_nothing_pins_no_settings(tmp_path: Path) -> None:
    """With neither rows nor failures the folder takes another identity and a new run_id; a failure kept or a row pins it."""
    folder = tmp_path / "run"

    def start(temperature: float) -> Run:
        return Run.open(folder, identity={"temperature": temperature}, extent={}, operation={})

    with start(1.0) as first:
        assert not first.resumed
    with start(1.0) as again:
        assert (again.resumed, again.run_id) == (True, first.run_id)
    Run.check(folder, identity={"temperature": 0.5})
    with start(0.5) as other:
        assert not other.resumed
        assert other.run_id != first.run_id
        other.fail({"kind": "engine"})
    assert read_run_json(folder)["identity"] == {"temperature": 0.5}
    with pytest.raises(StoreError, match=r"temperature: run has 0\.5, now 1\.0"):
        start(1.0)
    with pytest.raises(StoreError, match=r"temperature: run has 0\.5, now 1\.0"):
        Run.check(folder, identity={"temperature": 1.0})
    Run.check(folder, identity={"temperature": 1.0}, overwrite=True)


def test_a_folder_of_another_stage_is_refused_before_and_at_the_start(tmp_path: Path) -> None:
    """The check and the start of a run give one error for a folder of pairs, with overwrite, too."""
    pairs(str(Path(__file__).parents[2] / "sample_data/rollouts/clean.jsonl"), output=tmp_path)
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="pairs") as check_error:
            Run.check(tmp_path, identity={}, overwrite=overwrite)
        with pytest.raises(StoreError, match="pairs") as open_error:
            Run.open(tmp_path, identity={}, extent={}, operation={}, overwrite=overwrite)
        assert str(check_error.value) == str(open_error.value)
