"""Rollouts as tables: loading them, and rebuilding the prompts of their turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gymdata.public import path_of
from gymdata.store.reading import reading

__all__ = ["expand_turns", "load_rollouts", "reading"]

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    AnyTable = TypeVar("AnyTable", pa.Table, pl.DataFrame)


def load_rollouts(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """All rollouts under ``path`` (a run folder, a Parquet or JSON lines file, a glob) as a ``pyarrow.Table``.

    A run gives its sealed rows and those still journaled. Turns are as stored, prompts as deltas: see ``expand_turns``.
    ``polars.from_arrow`` makes a polars frame of it without copying most of it. Raises DataError for a path that holds no
    readable rollouts.
    """
    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.store import read_table

    path_of(path, "load_rollouts")
    return read_table(path, ROLLOUTS, columns)


def expand_turns(table: AnyTable) -> AnyTable:
    """``table`` with the field ``prompt_token_ids`` (list of int32) in each turn: the whole prompt that the model read.

    Takes a ``pyarrow.Table`` or a ``polars.DataFrame`` with the column ``turns`` (and ``rollout_id``, for error
    messages), and returns the same kind. Prompts repeat what came before, so this takes the memory that the stored form
    saves. Raises DataError naming the rollout and the turn when the turns were changed after collection.
    """
    import pyarrow as pa

    if isinstance(table, pa.Table):
        prompted = _with_prompts(table)
        return cast("AnyTable", table.set_column(table.column_names.index("turns"), "turns", prompted))
    import polars as pl

    needed = [name for name in ("rollout_id", "turns") if name in table.columns]
    turns = _with_prompts(table.select(needed).to_arrow())
    expanded: Any = pl.from_arrow(turns)
    return table.with_columns(expanded.alias("turns"))


def _with_prompts(table: pa.Table) -> pa.ChunkedArray:
    import pyarrow as pa

    from gymdata.errors import DataError
    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.rollouts.turn_columns import with_prompts
    from gymdata.store.columns import reshape

    if "turns" not in table.column_names:
        raise DataError.missing_columns("table to expand", ROLLOUTS.name, ["turns"], table.column_names)
    kind = ROLLOUTS.schema.field("turns").type
    turns = pa.chunked_array([reshape(chunk, kind) for chunk in table["turns"].chunks], kind)
    ids = table["rollout_id"] if "rollout_id" in table.column_names else pa.chunked_array([pa.array(range(len(turns)))])
    return with_prompts(turns, ids)
