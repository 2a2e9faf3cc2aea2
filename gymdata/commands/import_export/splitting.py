"""Imported rows in two files, one to train on and one held out, divided by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import Table
from gymdata.store import StageOutput, read_table, scan_batches
from gymdata.store.lineage import common_identity, parents_of

#: The folder in an import, or beside the tokens of a training, with ``train.parquet`` and ``test.parquet``.
SPLIT = "split"


def split_by_task(
    source: Path, table: Table, output: Path, share: float, seed: int, command: Sequence[str]
) -> dict[str, int]:
    """Write the rows of ``source`` to ``train.parquet`` and ``test.parquet`` of the folder ``output``; returns the tasks of
    each. ``share`` of the tasks, drawn with ``seed``, is the test side. Raises UsageError for fewer than two tasks."""
    tasks = read_table(source, table, ("task_id",))["task_id"].to_pylist()
    held_out = split_tasks(tasks, share, seed)
    sides = {"train": {*tasks} - held_out, "test": held_out}
    # Pairs have optional columns.
    names = next(scan_batches(source, table, None, 1)).schema.names
    schema = pa.schema([table.schema.field(name) for name in names], metadata=table.metadata)
    with StageOutput(output, "filter", overwrite=True) as out:
        for side, chosen in sides.items():
            named = pa.array(sorted(chosen), pa.string())
            rows = scan_batches(source, table)
            batches = (batch.filter(pc.is_in(batch.column("task_id"), value_set=named)) for batch in rows)
            out.batches(f"{side}.parquet", batches, table, schema, side=side)
        out.finish(
            {
                "command": list(command),
                "config": {"split_by": "task", "test_share": share, "seed": seed},
                "parents": parents_of([source]),
                "identity": common_identity([source]),
                "counts": {f"tasks_{side}": len(chosen) for side, chosen in sides.items()},
            }
        )
    return {side: len(chosen) for side, chosen in sides.items()}
