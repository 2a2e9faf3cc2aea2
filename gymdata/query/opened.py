"""``gymdata.open``: a run as an object, for notebooks and scripts.

Invariant: nothing is held open and nothing is cached, so what a method returns is what is on disk when it is called:
sealed rows and the whole lines of an open journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError
from gymdata.public import path_of
from gymdata.store.paths import find_run_json, read_facts, resolve

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

__all__ = ["OpenedRun", "open_run"]


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
    def facts(self) -> dict[str, Any]:
        """What run.json says; empty where there is none."""
        found = find_run_json(self.path)
        return {} if found is None else read_facts(found)

    def lazy(self) -> pl.LazyFrame:
        """The rollouts as a Polars LazyFrame: only the columns and rows that a query needs are read, in batches."""
        import polars as pl
        from polars.io.plugins import register_io_source

        from gymdata.rollouts.schema import ROLLOUTS
        from gymdata.store import scan_batches

        empty: Any = pl.from_arrow(ROLLOUTS.arrow.empty_table())
        schema, path = empty.schema, str(self.path)

        def batches(
            with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
        ) -> Iterator[pl.DataFrame]:
            names = with_columns if with_columns is not None else list(schema)
            left = n_rows
            # Without a column there would be no rows to count.
            for batch in scan_batches(path, ROLLOUTS, names or ["rollout_id"], batch_size or 4_096):
                frame: Any = pl.from_arrow(batch)
                missing = [pl.lit(None, schema[name]).alias(name) for name in names if name not in frame.columns]
                frame = frame.with_columns(missing).select(names)
                if left is not None:
                    frame = frame.head(left)
                    left -= frame.height
                yield frame if predicate is None else frame.filter(predicate)
                if left == 0:
                    return

        return register_io_source(batches, schema=schema)

    def arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rollouts, or some of their columns, as an Arrow table."""
        from gymdata.rollouts.schema import ROLLOUTS
        from gymdata.store import read_table

        return read_table(self.path, ROLLOUTS, columns)

    def query(self, sql: str) -> pa.Table:
        """The result of one SELECT over the run, as ``gymdata.query`` gives it."""
        from gymdata.query.run import query

        return query(sql, self.path)

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout as a dict, its turns with ``prompt_token_ids``. Raises DataError when there is none of that id."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from gymdata.data import expand_turns
        from gymdata.rollouts.schema import ROLLOUTS
        from gymdata.store import scan_batches

        known: list[str] = []
        for batch in scan_batches(self.path, ROLLOUTS, None, 256):
            ids = batch.column("rollout_id")
            found = pc.index(ids, rollout_id).as_py()
            if found >= 0:
                table = pa.Table.from_batches([batch.slice(found, 1)])
                row: dict[str, Any] = expand_turns(table).to_pylist()[0]
                return row
            known += ids.to_pylist()
        raise DataError.unknown_id(self.path, "rollout_id", rollout_id, known)


def open_run(path: str | Path) -> OpenedRun:
    """The run at ``path`` (a run folder, a file or a glob) as an object with ``lazy``, ``arrow``, ``query``, ``rollout``.

    Raises DataError when nothing is there.
    """
    return OpenedRun(path_of(path, "open"))
