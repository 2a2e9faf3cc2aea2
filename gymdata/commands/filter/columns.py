"""What an expression can name: columns of rollouts, their texts and rewards, fields of tasks, and facts of groups.

``Columns`` finds the columns that are named and gives them to DuckDB as one SELECT. Only what is named is read, and token
ids never. NaN is missing, and of rewards what is infinite, too; a group column describes the group as in the input, over
finite values. ``prompt`` is the contents of the messages before the model's first, ``text`` those of the model's messages,
and ``tool_calls`` the names and arguments of the model's calls, ``name({…})``, joined by blank lines. ``agents`` made the
model calls, and ``errors`` are what failed: both joined by commas, null where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.filter.conditions import column_of, unknown_column
from gymdata.commands.filter.tasks import Tasks
from gymdata.errors import DataError, UsageError
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.schema import AGENTS, ROLLOUTS, Table
from gymdata.scores.chosen import default_score, named_scores, scores_of, with_score
from gymdata.store import read_failures, read_table, scan_batches
from gymdata.store.lineage import refuse_duplicates
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
#: Columns that may be long, as SQL over stored ones. They are read in batches; of the turns, only their agents.
_LONG = {name: name for name in ("messages", "tools", "task", "extra")} | TEXTS
_LONG["agents"] = "nullif(array_to_string(list_sort(list_distinct(turns)), ', '), '')"
_SHORT = [name for name in ROLLOUTS.schema.names if name not in _LONG and name != "turns"]
_NUMBERS = [f.name for f in ROLLOUTS.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
#: Always read.
_KEYS = ("rollout_id", "task_id", "group_id", "rollout_index")
#: Of the finite values of a group. Sorted, because the order of sums changes their last bit.
_STATISTICS = {
    "mean": "CASE WHEN min({0}) = max({0}) THEN min({0}) ELSE avg({0} ORDER BY {0}) END",
    "min": "min({0})",
    "max": "max({0})",
    "std": "nullif(stddev_samp({0} ORDER BY {0}), 'nan')",
    "sum": "sum({0} ORDER BY {0})",
}
#: What a group has in common → the column that it is about, and SQL over it.
_COUNTS = {"n_rollouts": ("group_id", "count(*)"), "n_scored": ("reward", "count({0})")}
#: The same for every rollout of a group, as are the fields of its task.
_OF_GROUP = ("group_id", "task_id", "policy", "policy_hash", "policy_version", "task")


@dataclass(frozen=True, slots=True)
class Stored:
    """Rollouts: ``columns`` gives the short columns of some names, ``batches`` any, row for row alike."""

    columns: Callable[[Sequence[str]], pa.Table]
    batches: Callable[[Table, Sequence[str]], Iterable[pa.RecordBatch]]


class Columns:
    """The named columns of the rollouts under some paths. ``table``: their keys and named short columns; ``scored_by``:
    files of re-scorings that were read; ``scores``: the names of the scores, None for the total reward."""

    def __init__(self, sources: Sequence[str | Path], named: Mapping[str, str], stored: Stored | None = None) -> None:
        """``named``: name → where, for errors. ``stored``: the rollouts, where they are in memory; ``sources`` then say
        where their scores are.

        Raises UsageError for an unknown name, with the nearest; DataError for a path without rollouts; RefusedError (D701)
        when a rollout is there twice.
        """
        needed = {_base(name): where for name, where in named.items()} | dict(named)
        by_reward = stored is None and "reward" in needed
        only = default_score(sources, None, "reward_NAME in the condition")[0] if by_reward else None
        self._sources = sources
        self._stored = stored or Stored(
            lambda names: pa.concat_tables([read_table(path, ROLLOUTS, names) for path in sources]),
            lambda table, names: (batch for path in sources for batch in scan_batches(path, table, names)),
        )
        by_name = any(name.startswith("reward_") for name in needed)
        short = {*_KEYS, *needed, *(("reward", "rewards") if by_name else ())}
        self.table = self._stored.columns([name for name in _SHORT if name in short])
        if not self.table.num_rows:
            raise DataError.empty(sources[0], "rollouts")
        refuse_duplicates(self.table, sources)
        self.scored_by: list[Path] = []
        self.scores: list[str | None] = [only] if by_reward else []
        #: Columns that no file of rollouts has, and those of groups.
        self._made = dict[str, Any]()
        self._long, self._of_group = list[str](), dict[str, str]()
        if only is not None:
            warn(f"reward is the score {only!r}, the only re-scoring (reward_{TOTAL}: the total reward of collect)")
            rows, self.scored_by = with_score(sources, self.table, only)
            self._made["reward"] = rows["reward"]
        for name, where in needed.items():
            self._find(name, where)

    def _find(self, name: str, where: str) -> None:
        """Raises UsageError for a name of no column."""
        score, field = name.removeprefix("reward_"), name.removeprefix("task.")
        if name in self._made or name in self.table.column_names:
            return
        if name in _LONG:
            self._long.append(name)
        elif score != name and score in (TOTAL, *named_scores(self._sources, self.table)):
            _, self._made[name], scored_by = scores_of(self._sources, self.table, score)
            self.scored_by += [path for path in scored_by if path not in self.scored_by]
            self.scores.append(score)
        elif field != name and field in self._tasks.names:
            self._made[name] = self._tasks.column(field, where)[: self.table.num_rows]
        elif name == "errors":
            self._made[name] = _errors(self._sources, self.table["rollout_id"])
        elif _base(name) != name:
            self._of_group[name] = _COUNTS[name][1] if name in _COUNTS else _STATISTICS[name.partition("_")[0]]
        else:
            raise self._unknown(name, where)

    @cached_property
    def _tasks(self) -> Tasks:
        return Tasks(batch.column("task") for batch in self._stored.batches(ROLLOUTS, ("task",)))

    def source(self, con: Any) -> str:
        """A SELECT for ``con`` that gives each rollout's ``row`` from 0, ``rollout_id``, ``rollout_index``, ``group`` (a
        number) and the named columns, called as ``column_of`` says."""
        codes = self.table["group_id"].combine_chunks().dictionary_encode().indices
        short = self.table.select([name for name in self.table.column_names if name not in self._made])
        short = short.append_column("row", pa.array(np.arange(len(codes)))).append_column("group", codes)
        for name, values in self._made.items():
            short = short.append_column(column_of(name), values)
        con.register("short", short)
        con.register("given", self._with_long(short) if self._long else short)
        sql = {field.name: _known(field) for field in short.schema if field.name in _SHORT}
        sql |= {name: column_of(name) for name in self._made} | {name: _LONG[name] for name in self._long}
        shown = ", ".join(f"{of} AS {column_of(name)}" for name, of in sql.items())
        rows = f'SELECT row, rollout_id, rollout_index, "group", {shown} FROM given'
        if not self._of_group:
            return rows
        statistics = ", ".join(
            f"{statistic.format(_finite(sql[_base(name)]))} AS {column_of(name)}"
            for name, statistic in self._of_group.items()
        )
        groups = f'SELECT "group", {statistics} FROM short GROUP BY "group"'
        return f'SELECT * FROM ({rows}) JOIN ({groups}) USING ("group")'

    def _with_long(self, short: pa.Table) -> pa.RecordBatchReader:
        """``short`` and what the long columns are made of, in batches."""
        words = {word for name in self._long for word in re.findall(r"\w+", _LONG[name])}
        read = [name for name in ROLLOUTS.schema.names if name in words and name not in short.column_names]
        agents = pa.field("turns", pa.list_(pa.string()))
        fields = [agents if name == "turns" else ROLLOUTS.schema.field(name) for name in read]
        schema = pa.schema([*short.schema, *fields])

        def rows() -> Iterator[pa.RecordBatch]:
            first = 0
            for batch in self._stored.batches(AGENTS, read):
                # More rows may have been collected since the others were read.
                for beside in short.slice(first, batch.num_rows).combine_chunks().to_batches():
                    long = batch.slice(0, beside.num_rows)
                    columns = [_agents(long[name]) if name == "turns" else long[name] for name in read]
                    yield pa.RecordBatch.from_arrays([*beside.columns, *columns], schema=schema)
                first += batch.num_rows

        return pa.RecordBatchReader.from_batches(schema, rows())

    def _unknown(self, name: str, where: str) -> UsageError:
        scores = named_scores(self._sources, self._stored.columns(["rewards"]))
        shown = [
            *(*_SHORT, *_LONG, "errors", *_COUNTS),
            *(f"reward_{score}" for score in scores),
            *(f"task.{path}" for path in sorted(self._tasks.names)),
        ]
        numbers = [of for of in shown if of in _NUMBERS or of.startswith("reward_")]
        names = [*shown, *(f"{statistic}_{of}" for of in numbers for statistic in _STATISTICS)]
        shown.append(f"{'_, '.join(_STATISTICS)}_ before a number's name for its group")
        return unknown_column(name, names, where, shown)


def category_name(name: str) -> str:
    """``name`` as a column of few values: itself where it is one, else the task's field of that name."""
    is_column = name in (*_SHORT, "agents", "errors") or name.startswith(("reward_", "task.")) or _base(name) != name
    return name if is_column and name != "rewards" else f"task.{name}"


def is_of_group(name: str) -> bool:
    """Whether the column is the same for every rollout of a group."""
    return name in _OF_GROUP or name.startswith("task.") or _base(name) != name


def _base(name: str) -> str:
    """The column of rollouts that a column of groups is about; of another, itself."""
    if name in _COUNTS:
        return _COUNTS[name][0]
    statistic, _, of = name.partition("_")
    return of if statistic in _STATISTICS and (of in _NUMBERS or of.startswith("reward_")) else name


def _known(column: pa.Field) -> str:
    """SQL of a stored column with NULL for NaN; of a float32 as the double of its shortest spelling, so that the mean of
    0.7 is 0.7."""
    if column.name == "reward":
        return _finite(column.name)
    if pa.types.is_float32(column.type):
        return f"nullif({column.name}::VARCHAR::DOUBLE, 'nan')"
    return f"nullif({column.name}, 'nan')" if pa.types.is_float64(column.type) else column.name


def _finite(sql: str) -> str:
    return f"CASE WHEN isfinite({sql}::DOUBLE) THEN {sql}::DOUBLE END"


def _agents(turns: pa.ListArray) -> pa.ListArray:
    ends = np.cumsum(np.append(0, pc.list_value_length(turns).to_numpy(zero_copy_only=False)))
    return pa.ListArray.from_arrays(ends.astype(np.int32), turns.flatten().field("agent"))


def _errors(sources: Iterable[str | Path], ids: pa.ChunkedArray) -> pa.Array:
    """What failed in the attempts at each rollout, ``engine``, ``environment``, ``agent`` or ``reward NAME``; null where
    nothing did. ``ids``: of the rollouts."""
    by_rollout: dict[str, set[str]] = {}
    for failure in (failure for path in sources for failure in read_failures(path)):
        kind = str(failure.get("kind"))
        by_rollout.setdefault(str(failure.get("rollout_id")), set()).add(
            str(failure.get("place")) if kind == "reward" else kind
        )
    texts = {rollout: ", ".join(sorted(kinds)) for rollout, kinds in by_rollout.items()}
    return pa.array([texts.get(rollout) for rollout in ids.to_pylist()] if texts else [None] * len(ids), pa.string())
