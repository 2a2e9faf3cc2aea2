"""``gymdata.open``, ``load_rollouts`` and ``expand_turns``: rollouts for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gymdata.errors import DataError
from gymdata.public import path_of
from gymdata.store.paths import find_run_json, read_facts, resolve

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

    path = path_of(path, "load_rollouts")
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

    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.rollouts.turn_columns import with_prompts

    if "turns" not in table.column_names:
        raise DataError.missing_columns("table to expand", ROLLOUTS.name, ["turns"], table.column_names)
    kind = ROLLOUTS.schema.field("turns").type
    turns = table["turns"].cast(kind)
    ids = table["rollout_id"] if "rollout_id" in table.column_names else pa.chunked_array([pa.array(range(len(turns)))])
    return with_prompts(turns, ids)


class OpenedRun:
    """The rollouts under a path: a run folder, a Parquet or JSON lines file, or a glob of these."""

    def __init__(self, path: str | Path) -> None:
        """Raises DataError when nothing is there."""
        self.path = Path(path)
        self.files = [source.path for source in resolve(path)]

    def __repr__(self) -> str:
        stage = self.facts.get("stage")
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"<gymdata run {self.path}: {f'{stage}, ' if stage else ''}{count}>"

    @property
    def facts(self) -> dict[str, object]:
        """The content of run.json; empty without one."""
        run_json = find_run_json(self.path)
        return {} if run_json is None else read_facts(run_json)

    def lazy(self) -> pl.LazyFrame:
        """The rollouts as a Polars LazyFrame: only the columns and rows that a query needs are read, in batches."""
        from gymdata.store import scan_lazy

        return scan_lazy(self.path)

    def arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rollouts, or some of their columns, as an Arrow table."""
        return load_rollouts(self.path, columns)

    def query(self, sql: str) -> pa.Table:
        """The result of one SELECT over the run, as ``gymdata.query`` gives it."""
        from gymdata.commands.query.run import query

        return query(sql, self.path)

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout as a dict, its turns with ``prompt_token_ids``. Raises DataError for an unknown id."""
        import numpy as np

        from gymdata.rollouts.schema import ROLLOUTS
        from gymdata.store.partial_reads import rows_at

        rollout_ids = self.arrow(["rollout_id"])["rollout_id"].to_pylist()
        if rollout_id not in rollout_ids:
            raise DataError.unknown_id(self.path, "rollout_id", rollout_id, rollout_ids)
        table = next(rows_at(self.path, ROLLOUTS, np.array([rollout_ids.index(rollout_id)])))
        return dict(expand_turns(table).to_pylist()[0])


def open_run(path: str | Path) -> OpenedRun:
    """The run at ``path`` (a run folder, a file or a glob) as an object with ``lazy``, ``arrow``, ``query``, ``rollout``.

    Raises DataError when nothing is there.
    """
    return OpenedRun(path_of(path, "open"))
