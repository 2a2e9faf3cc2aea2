"""What a power cut must find: a file is on the disk before it gets its name, and that before what relies on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

from gymdata.rollouts.schema import SCORES
from gymdata.store import StageOutput


class Operation(NamedTuple):
    """``kind`` is sync, rename or remove; ``path`` the file or folder (for a rename the old name), ``to`` the new name."""

    kind: str
    path: Path
    to: Path | None = None


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """All syncs, renames and removals of this process from here on, in order."""
    recorded: list[Operation] = []

    def recording(kind: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: str | Path, *to: str | Path, **more: object) -> None:
            real(path, *to, **more)
            recorded.append(Operation(kind, Path(path), *map(Path, to)))

        return call

    monkeypatch.setattr(os, "replace", recording("rename", os.replace))
    monkeypatch.setattr(os, "rename", recording("rename", os.rename))
    monkeypatch.setattr(os, "unlink", recording("remove", os.unlink))

    def sync(fd: int) -> None:
        recorded.append(Operation("sync", Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(os, "fsync", sync)
    return recorded


def renames(operations: list[Operation]) -> list[tuple[int, Path, Path]]:
    return [(i, o.path, o.to) for i, o in enumerate(operations) if o.kind == "rename" and o.to is not None]


def refuse_unsynced_content(operations: list[Operation]) -> None:
    for at, old, new in renames(operations):
        assert Operation("sync", old) in operations[:at], f"{new.name} got its name before its content was on the disk"


def test_a_part_is_synced_then_named_and_its_lines_go_last(tmp_path: Path, open_run, row, operations: list[Operation]):
    """A part is on the disk, then has its name, then run.json names it on the disk; only then the lines go."""
    with open_run(rows_per_file=2) as run:
        for i in range(3):
            run.append(row(i))
    refuse_unsynced_content(operations)
    parts = [(at, new) for at, _, new in renames(operations) if new.name.startswith("part-")]
    assert [new.name for _, new in parts] == [f"part-0000{i}.parquet" for i in range(2)]
    for at, part in parts:
        named = next(i for i, _, new in renames(operations) if i > at and new.name == "run.json")
        gone = operations.index(Operation("remove", part.with_suffix(".jsonl")))
        assert Operation("sync", part.parent) in operations[at:named]
        assert Operation("sync", tmp_path / "run") in operations[named:gone]


def test_lines_that_stay_are_on_the_disk_when_they_are_named(
    tmp_path: Path, open_run, row, operations: list[Operation]
):
    """Neither renamed nor removed: sealing them is their sync, then their name in run.json."""
    with open_run(rows_per_file=2, format="jsonl", fsync_interval_s=60) as run:
        for i in range(3):
            run.append(row(i))
    touched = [o for o in operations if o.path.name.startswith("part-")]
    rollouts = tmp_path / "run" / "rollouts"
    assert touched == [Operation("sync", rollouts / f"part-0000{i}.jsonl") for i in range(2)]
    for synced in touched:
        at = operations.index(synced)
        assert Operation("sync", rollouts) in operations[:at]
        assert any(i > at and new.name == "run.json" for i, _, new in renames(operations))


def test_without_an_interval_each_row_is_on_the_disk_when_append_returns(open_run, row, operations: list[Operation]):
    """With an interval of 0 every append syncs its line."""
    with open_run(fsync_interval_s=0) as run:
        operations.clear()
        for i in range(3):
            run.append(row(i))
            assert operations[-1].path.suffix == ".jsonl"
        assert [o.kind for o in operations if o.path.suffix == ".jsonl"] == ["sync"] * 3


def test_a_derived_output_is_named_when_it_is_on_the_disk(tmp_path: Path, operations: list[Operation]):
    """What a command wrote, and its run.json, are on the disk before the folder gets its name."""
    row = {"rollout_id": "r", "name": "s", "value": 1.0, "status": "scored", "source": "x", "run_id": "run-1"}
    with StageOutput(tmp_path / "out", "score", overwrite=False) as output:
        output.table("scores.parquet", pa.Table.from_pylist([row], schema=SCORES.schema), SCORES)
        output.finish({})
    refuse_unsynced_content(operations)
    described, named = (at for at, _, _ in renames(operations))
    assert [new.name for _, _, new in renames(operations)] == ["run.json", "out"]
    assert Operation("sync", tmp_path / ".out.tmp" / "new" / "scores.parquet") in operations[:described]
    assert Operation("sync", tmp_path / ".out.tmp" / "new") in operations[described:named]
    assert Operation("sync", tmp_path) in operations[named:]
