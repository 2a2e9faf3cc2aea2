"""Tables of training data as parts of a few rows each, and the checks that need all parts.

The parts are the rows of ``read_table`` in its order; what would be refused of the whole table is refused, after the last
part at the latest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gymdata.commands.train.pair_data import check_numbers
from gymdata.commands.train.rollout_data import made_sequences, no_token_ids
from gymdata.commands.train.sequence_data import WEIGHTS, sequence_names
from gymdata.errors import DataError, counted
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import EXPERIENCES, ROLLOUTS, Table
from gymdata.rollouts.sequences import Abandoned, require_agents
from gymdata.store import scan_batches

#: Rows of a part. A part takes about a hundred bytes per token while it is checked.
ROWS = 1024


def parts(source: str, table: Table, columns: Sequence[str], rows: int = ROWS) -> Iterator[tuple[int, pa.Table]]:
    """(number of its first row, part) of a path; a single empty part for an empty table. Raises DataError for a row that is
    there twice, or that has a reward that is not a finite number."""
    first, seen, what = 0, set[bytes](), table.name.removesuffix("s")
    for batch in scan_batches(source, table, columns, rows):
        part = pa.Table.from_batches([batch])
        names = sequence_names(part) if table is EXPERIENCES else part[f"{what}_id"].to_pylist()
        for name in names:
            if (key := xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass"))) in seen:
                raise DataError(f"{source}: duplicate {what} {name}", hint="was the same file passed twice?")
            seen.add(key)
        if "reward" in columns:  # null: there is none
            rewards = pa.table({"reward": pc.fill_null(part["reward"], 0.0)})
            check_numbers(rewards, {"reward": -np.inf}, what, names, source, first)
        yield first, part
        first += batch.num_rows
    if not first:
        yield 0, pa.schema([table.schema.field(name) for name in columns]).empty_table()


def experience_parts(source: str, columns: Sequence[str], rows: int = ROWS) -> Iterator[tuple[int, pa.Table]]:
    """``parts`` of experiences. Raises DataError for a weight that some rows lack."""
    has: dict[str, bool] = {}
    for first, part in parts(source, EXPERIENCES, columns, rows):
        for name in set(WEIGHTS).intersection(part.column_names):
            lacking = part[name].null_count
            complete = has.setdefault(name, not lacking) if part.num_rows else not lacking
            if lacking not in (0, len(part)) or complete == bool(lacking):
                weights = [batch.column(0) for batch in scan_batches(source, EXPERIENCES, [name], ROWS)]
                n_lacking, n_rows = sum(c.null_count for c in weights), sum(map(len, weights))
                raise DataError(
                    f"{source}: {name} is missing in {n_lacking:,} of {counted(n_rows, 'row')}",
                    hint="give it in every row, or drop the column",
                )
        yield first, part


def rollout_parts(
    source: str,
    columns: Sequence[str],
    chosen: np.ndarray,
    agents: Collection[str],
    abandoned: Abandoned,
    *,
    rendered: bool,
    heads: bool = False,
    rows: int = ROWS,
) -> Iterator[tuple[np.ndarray, list[str], pa.Table, int]]:
    """(numbers among ``chosen``, rollout_ids, and what ``made_sequences`` returns) of the rollouts at ``chosen``, row
    numbers that rise. Raises as it does."""
    if agents:
        turns = (chunk for *_, part in chosen_parts(source, columns, chosen, rows) for chunk in part["turns"].chunks)
        require_agents(turns, agents, source)
    n_sequences = 0
    for numbers, rollouts in chosen_parts(source, columns, chosen, rows):
        sequences, n_abandoned = made_sequences(rollouts, source, agents, abandoned, rendered=rendered, heads=heads)
        n_sequences += sequences.num_rows
        yield numbers, rollouts["rollout_id"].to_pylist(), sequences, n_abandoned
    if not n_sequences:
        raise no_token_ids(source)


def chosen_parts(
    source: str, columns: Sequence[str], chosen: np.ndarray, rows: int
) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """(numbers among ``chosen``, their rows) of each part that has any."""
    for first, part in parts(source, ROLLOUTS, columns, rows):
        begin, end = np.searchsorted(chosen, (first, first + part.num_rows))
        if begin < end:
            yield np.arange(begin, end), part.take(pa.array(chosen[begin:end] - first))


def held_out(source: str, table: Table, split: float, seed: int) -> set[str]:
    """The tasks that are held out of a path: none without a ``split``. Raises UsageError when there are too few."""
    return split_tasks(distinct(source, table, "task_id"), split, seed) if split else set()


def distinct(source: str, table: Table, column: str) -> set[Any]:
    values: set[Any] = set()
    for batch in scan_batches(source, table, [column]):
        values.update(batch.column(0).unique().to_pylist())
    return values
