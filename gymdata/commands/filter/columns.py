"""What an expression can name: columns of rollouts, their texts and rewards, fields of tasks, and facts of groups.

They are the view ``rollouts`` of a DuckDB connection, as ``query`` has it: only what is named is read, and token ids never.
NaN is missing, and of rewards what is infinite, too; a group column describes the group as in the input, over finite
values. ``prompt`` is the contents of the messages before the model's first, ``text`` those of the model's messages, and
``tool_calls`` the names and arguments of the model's calls, ``name({…})``, joined by blank lines. ``agents`` made the model
calls, and ``errors`` are what failed: both joined by commas, null where there is none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from gymdata.commands.filter.conditions import Expression, about, connection
from gymdata.commands.query.views import failures, known
from gymdata.errors import GymdataError, UsageError, counted
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.schema import AGENTS, ROLLOUTS
from gymdata.scores.chosen import default_score, scores_of, with_score
from gymdata.store import scan_batches
from gymdata.store.reading import warn

#: The place of the model's first message. Its messages carry the number of their turn; where none does (imported files),
#: they are the last ``n_turns`` of assistants.
_FIRST = """coalesce(list_position([m.turn IS NOT NULL FOR m IN messages], true),
  [k FOR k IN range(1, len(messages) + 1) IF messages[k].role = 'assistant'][-greatest(n_turns, 1):][1],
  len(messages) + 1)"""
_OF_MODEL, _LINES = f"FOR m IN messages[{_FIRST}:]", "chr(10) || chr(10)"
#: What stands before the arguments of a call in the JSON of a column, whose quotes are searched as the model meant them.
_CALL = r'\{[^{}]*"function": ?\{"name": ?"([^"]*)", ?"arguments": ?"?'
_CALLED = rf"""replace(regexp_replace(m.tool_calls, '{_CALL}', '\1(', 'g'), '\"', '"')"""
#: What messages say.
TEXTS = {
    "prompt": f"array_to_string([m.content FOR m IN messages[:{_FIRST} - 1] IF m.content <> ''], {_LINES})",
    "text": f"array_to_string([m.content {_OF_MODEL} IF m.role = 'assistant' AND m.content <> ''], {_LINES})",
    "tool_calls": f"array_to_string([{_CALLED} {_OF_MODEL} IF m.tool_calls NOT IN ('null', '[]')], {_LINES})",
}
_KEYS = ("row", "rollout_id", "task_id", "group_id", "rollout_index")
_STORED = [f for f in ROLLOUTS.schema if f.name != "turns"]
_NUMBERS = [f.name for f in _STORED if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
_ERRORS = """SELECT rollout_id, string_agg(kind, ', ' ORDER BY kind) AS errors FROM (
  SELECT DISTINCT rollout_id, CASE kind WHEN 'reward' THEN place ELSE kind END AS kind FROM failures) GROUP BY rollout_id"""
#: Of the finite values of a group. Sorted, because the order of sums changes their last bit.
_STATISTICS = {
    "mean": "CASE WHEN min({0}) = max({0}) THEN min({0}) ELSE avg({0} ORDER BY {0}) END",
    "min": "min({0})",
    "max": "max({0})",
    "std": "nullif(stddev_samp({0} ORDER BY {0}), 'nan')",
    "sum": "sum({0} ORDER BY {0})",
}
#: The same for every rollout of a group, as are the fields of its task.
_OF_GROUP = ("group_id", "task_id", "policy", "policy_hash", "policy_version", "task", "n_rollouts", "n_scored")


class Rollouts(ds.FileSystemDataset):  # type: ignore[misc]  # pyarrow has no types
    """Rollouts that DuckDB reads as it needs them, each with its ``row`` from 0 and the agents of its model calls.
    ``batches``: columns of these names of all of them; of ``turns`` no more than the agents need be there."""

    def __init__(self, batches: Callable[[Sequence[str]], Iterable[pa.RecordBatch]]) -> None:
        schema = pa.schema([("row", pa.int64()), ("agents", pa.list_(pa.string())), *_STORED])
        super().__init__([], schema, ds.ParquetFileFormat(), LocalFileSystem())
        self._batches = batches
        #: A gymdata error that was raised inside DuckDB, which keeps only its text.
        self.fault: GymdataError | None = None

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: object) -> SimpleNamespace:
        """Called by DuckDB: ``columns`` (all, when None) of the rows that pass ``filter``, as what it takes of a scanner."""
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        reader = pa.RecordBatchReader.from_batches(schema, self._rows(names, filter))
        return SimpleNamespace(to_reader=lambda: reader, projected_schema=schema)

    def _rows(self, names: list[str], filter: Any) -> Iterator[pa.RecordBatch]:
        # Columns that the expression may name, possibly too many.
        words = set(re.findall(r"\w+", str(filter))) if filter is not None else set()
        needed = [name for name in self.schema.names if name in words or name in names]
        schema = pa.schema([self.schema.field(name) for name in needed])
        # Without a column there would be no rows to count.
        read = ["turns" if name == "agents" else name for name in needed if name != "row"] or ["rollout_id"]
        first = 0
        try:
            for batch in self._batches(read):
                values = dict(zip(read, batch.columns, strict=True))
                if "turns" in values:
                    values["agents"] = _agents(values["turns"])
                values["row"] = pa.array(np.arange(first, first + batch.num_rows))
                first += batch.num_rows
                rows = pa.RecordBatch.from_arrays([values[name] for name in needed], schema=schema)
                yield (rows if filter is None else rows.filter(filter)).select(names)
        except GymdataError as error:
            self.fault = error
            raise


@dataclass
class Scores:
    """The scores that expressions name. ``names``: None is the total reward; ``files``: those of re-scorings that were read;
    ``columns``: the values of the rollouts, by ``rollout_id``."""

    names: list[str | None] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    columns: dict[str, pa.ChunkedArray] = field(default_factory=dict)


def evaluate(
    con: Any, expressions: Mapping[str, Expression], sources: Sequence[str | Path], rollouts: Rollouts | None = None
) -> Scores:
    """Make the table ``rows``: ``row``, ``rollout_id``, ``task_id``, ``group_id`` and ``rollout_index`` of each rollout
    under ``sources``, and each of ``expressions`` by its name. All are checked before a row is evaluated.

    ``rollouts``: where they are in memory, their rewards chosen. Raises UsageError for an expression that names an unknown
    column, is of another kind, that DuckDB cannot evaluate, or that computes with NaN.
    """
    read = rollouts or Rollouts(lambda names: (b for source in sources for b in scan_batches(source, AGENTS, names)))
    named = {name: expression.where for expression in expressions.values() for name in expression.names()}
    try:
        with about("; ".join(expression.subject for expression in expressions.values())):
            scores = _make_view(con, read, sources, named, chosen=rollouts is not None)
            nan = {name: expression.check(con) for name, expression in expressions.items()}
            made = "".join(f", {e.sql} AS {name}, {nan[name]} AS nan_{name}" for name, e in expressions.items())
            con.execute(f"CREATE TEMP TABLE rows AS SELECT {', '.join(_KEYS)}{made} FROM rollouts")
    except UsageError as error:
        raise read.fault or error from error.__cause__
    for name, expression in expressions.items():
        if n := con.execute(f"SELECT count(*) FROM rows WHERE nan_{name}").fetchall()[0][0]:
            hint = "CASE WHEN … THEN … END leaves these out"
            raise UsageError(f"{expression.subject}: computes with NaN for {counted(n, 'rollout')}", hint=hint)
    return scores


def _make_view(
    con: Any, read: Rollouts, sources: Sequence[str | Path], named: Mapping[str, str], chosen: bool
) -> Scores:
    """Make the view ``rollouts`` of the columns that are named; of all, of which DuckDB names the nearest, where one is
    unknown."""
    con.register("stored", read)
    scores = _scores(read, sources, named, chosen)
    facts = {"n_rollouts": "count(*)", "n_scored": "count(reward)"}
    for number in {*_NUMBERS, *scores.columns} - {"rollout_id"}:
        facts |= {f"{statistic}_{number}": sql.format(_finite(number)) for statistic, sql in _STATISTICS.items()}
    names = {name.partition(".")[0] for name in named}
    if not names <= {*_columns(), "errors", *scores.columns, *facts}:
        names = {*_columns(), *facts}
    needed = {*names, *map(_number_of, names)} - scores.columns.keys() | {*_KEYS}
    shown = {name: sql for name, sql in _columns().items() if name in needed}
    if any(name.startswith("task.") for name in named):
        sql = "SELECT json_group_structure(task) FROM (SELECT DISTINCT nullif(task, '')::JSON AS task FROM stored)"
        # A field that has several kinds of values is text.
        structure = re.sub('"JSON"(?!:)', '"VARCHAR"', con.execute(sql).fetchall()[0][0]).replace("'", "''")
        shown["task"] = f"from_json(nullif(task, ''), '{structure}')"
    rows = f"SELECT {', '.join(f'{sql} AS {name}' for name, sql in shown.items())} FROM stored"
    if "errors" in names:
        con.register("failures", failures(sources))
        rows = f"SELECT * FROM ({rows}) LEFT JOIN ({_ERRORS}) USING (rollout_id)"
    if scores.columns:
        con.register("scored", pa.table(scores.columns))
        rows = f"SELECT * FROM ({rows}) LEFT JOIN (SELECT DISTINCT ON (rollout_id) * FROM scored) USING (rollout_id)"
    if of_groups := [f'{sql} AS "{name}"' for name, sql in facts.items() if name in names]:
        con.execute(f"CREATE TEMP VIEW each AS {rows}")
        groups = f"SELECT group_id, {', '.join(of_groups)} FROM each GROUP BY group_id"
        rows = f"SELECT * FROM each JOIN ({groups}) USING (group_id)"
    con.execute(f"CREATE TEMP VIEW rollouts AS {rows}")
    return scores


@functools.cache
def _columns() -> dict[str, str]:
    """SQL of the columns over what is stored, with NULL for NaN."""
    with connection() as con:
        con.register("stored", Rollouts(lambda _: ()))
        rows = con.sql("FROM stored")
        stored = {name: known(name, kind) for name, kind in zip(rows.columns, rows.types, strict=True)}
    agents = "nullif(array_to_string(list_sort(list_distinct(agents)), ', '), '')"
    return stored | TEXTS | {"reward": _finite("reward"), "agents": agents}


def _scores(read: Rollouts, sources: Sequence[str | Path], named: Mapping[str, str], chosen: bool) -> Scores:
    """The scores that are named: ``reward_NAME`` each, and ``reward`` where that is not the stored one."""
    scores, of = Scores(), {_number_of(name): where for name, where in named.items()}
    if "reward" in of and not chosen:
        scores.names.append(default_score(sources, None, "reward_NAME in the condition")[0])
    by_name = {name: where for name, where in of.items() if name.startswith("reward_")}
    if not any(scores.names) and not by_name:
        return scores
    rows = read.scanner(("rollout_id", "reward", "rewards")).to_reader().read_all()
    scores.columns["rollout_id"] = rows["rollout_id"]
    for only in filter(None, scores.names):
        warn(f"reward is the score {only!r}, the only re-scoring (reward_{TOTAL}: the total reward of collect)")
        rescored, scores.files = with_score(sources, rows, only)
        scores.columns["reward"] = rescored["reward"]
    for name, where in by_name.items():
        if name.lower() in map(str.lower, scores.columns):
            raise UsageError.bad_value(where, name, "one of the scores whose names differ in case only")
        score = name.removeprefix("reward_")
        _, scores.columns[name], files = scores_of(sources, rows, score, where.strip("-").replace("-", "_"))
        scores.files += [file for file in files if file not in scores.files]
        scores.names.append(score)
    return scores


def category_name(name: str) -> str:
    """``name`` as a column of few values: itself where it is one, else the task's field of that name."""
    is_column = name in (*(f.name for f in _STORED), "agents", "errors") or name.startswith(("reward_", "task."))
    return name if is_column or is_of_group(name) else f"task.{name}"


def is_of_group(name: str) -> bool:
    """Whether the column is the same for every rollout of a group."""
    return name in _OF_GROUP or name.startswith("task.") or name.partition("_")[0] in _STATISTICS


def _number_of(name: str) -> str:
    """The column that a column of groups is about; of another, itself."""
    statistic, _, of = name.partition("_")
    return "reward" if name == "n_scored" else of if statistic in _STATISTICS else name


def _finite(name: str) -> str:
    return f'CASE WHEN isfinite("{name}"::DOUBLE) THEN "{name}"::DOUBLE END'


def _agents(turns: pa.ListArray) -> pa.ListArray:
    ends = np.cumsum(np.append(0, pc.list_value_length(turns).to_numpy(zero_copy_only=False)))
    return pa.ListArray.from_arrays(ends.astype(np.int32), turns.flatten().field("agent"))
