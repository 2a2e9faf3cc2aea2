"""What a condition can name: columns of rollouts, their texts and rewards, fields of their tasks, and facts of their groups.

Only what is named is read, and token ids never; NaN is missing, and of rewards what is infinite, too; a group column
describes the group as in the input. ``prompt`` is the contents of the messages before the model's first, ``text`` those
of the model's messages, and ``tool_calls`` the names and arguments of the model's calls, ``name({…})``, joined by blank
lines. ``agents`` made the model calls, and ``errors`` are what failed: both joined by commas, null where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.filter.conditions import connection, unknown_column
from gymdata.errors import DataError, UsageError, json_kind
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.messages import field_at, object_of
from gymdata.rollouts.schema import AGENTS, ROLLOUTS, Table
from gymdata.scores.chosen import default_score, named_scores, scores_of, with_score
from gymdata.stats import STATISTICS, group_statistic, known_rewards
from gymdata.store import read_failures, read_table, scan_batches
from gymdata.store.lineage import refuse_duplicates
from gymdata.store.lines import decode
from gymdata.store.reading import warn

_ALWAYS = ("rollout_id", "task_id", "group_id", "rollout_index")
#: The same for every rollout of a group, as are the fields of its task.
_OF_GROUP = ("group_id", "task_id", "policy", "policy_hash", "policy_version", "task")
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
_CALLED_BY = pa.schema([pa.field("agents", pa.list_(pa.string()))])
_AGENTS = "nullif(array_to_string(list_sort(list_distinct(agents)), ', '), '')"
#: Columns that may be long are read in batches.
_LONG = {name: name for name in ("messages", "tools", "task", "extra")} | TEXTS
_SHORT = [name for name in ROLLOUTS.schema.names if name not in _LONG and name != "turns"]
_NUMBERS = [f.name for f in ROLLOUTS.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
#: What a group has in common → the column that it is about.
_COUNTS = {"n_rollouts": "group_id", "n_scored": "reward"}
_PLAIN = (*_SHORT, *_LONG, "agents", "errors", *_COUNTS)


@dataclass
class RolloutColumns:
    """One entry per rollout for every named column. ``scored_by``: files of re-scorings that were read for it; ``scores``:
    the names of the scores, None for the total reward; ``groups``: each row's group as a code from 0."""

    table: pa.Table
    groups: np.ndarray
    values: dict[str, pa.Array] = field(default_factory=dict)
    scored_by: list[Path] = field(default_factory=list)
    scores: list[str | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rollouts that are in memory already: ``columns`` gives the short columns of some names, ``batches`` any."""

    columns: Callable[[Sequence[str]], pa.Table]
    batches: Callable[[Table, Sequence[str]], Iterable[pa.RecordBatch]]


def load_columns(
    sources: Sequence[str | Path], named: Mapping[str, str], rollouts: Loaded | None = None
) -> RolloutColumns:
    """The columns that are ``named`` (name → where, for errors) of the rollouts under ``sources``.

    ``rollouts``: their rows, where they are in memory; ``sources`` then say where their scores are. Raises UsageError for
    an unknown name, with the nearest; DataError for a path without rollouts; RefusedError (D701) when a rollout is there
    twice.
    """
    needed = {_base(name): where for name, where in named.items()} | dict(named)
    by_reward = rollouts is None and "reward" in needed
    only = default_score(sources, None, "reward_NAME in the condition")[0] if by_reward else None
    rollouts = rollouts or Loaded(
        lambda names: pa.concat_tables([read_table(path, ROLLOUTS, names) for path in sources]),
        lambda table, names: (batch for path in sources for batch in scan_batches(path, table, names)),
    )
    by_name = any(name.startswith("reward_") for name in needed)
    short = {*_ALWAYS, *needed, *(("reward", "rewards") if by_name else ())}
    table = rollouts.columns([name for name in _SHORT if name in short])
    if not table.num_rows:
        raise DataError.empty(sources[0], "rollouts")
    refuse_duplicates(table, sources)
    groups = table["group_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    columns = RolloutColumns(table, groups, scores=[only] if by_reward else [])
    values = columns.values
    if only is not None:
        warn(f"reward is the score {only!r}, the only re-scoring (reward_{TOTAL}: the total reward of collect)")
        # Beside the table, in which reward_reward finds the total reward.
        rows, columns.scored_by = with_score(sources, table, only)
        values["reward"] = rows["reward"].combine_chunks()
    tasks = _Tasks(rollouts) if any(name.startswith("task.") for name in needed) else None
    long = {name: sql for name, sql in _LONG.items() if name in needed}
    read = [name for name in ROLLOUTS.arrow.names if re.search(rf"\b{name}\b", " ".join(long.values()))]
    batches = (batch.select(read) for batch in rollouts.batches(ROLLOUTS, read))
    made = _in_batches(batches, pa.schema([ROLLOUTS.arrow.field(name) for name in read]), long)
    agents = (pa.record_batch([_agents(b.column("turns"))], _CALLED_BY) for b in rollouts.batches(AGENTS, ("turns",)))
    made |= _in_batches(agents, _CALLED_BY, {"agents": _AGENTS} if "agents" in needed else {})
    # More rows may have been collected since the others were read.
    values |= {name: of[: len(groups)] for name, of in made.items()}
    scores = [TOTAL, *named_scores(sources, table)] if by_name else []
    for name, where in sorted(needed.items(), key=lambda item: is_of_group(item[0])):
        if name.startswith("reward_") and name.removeprefix("reward_") in scores:
            _, of_score, scored_by = scores_of(sources, table, name.removeprefix("reward_"))
            values[name] = of_score.combine_chunks()
            columns.scored_by += [path for path in scored_by if path not in columns.scored_by]
            columns.scores.append(name.removeprefix("reward_"))
        elif tasks is not None and name.startswith("task.") and name.removeprefix("task.") in tasks.names:
            values[name] = tasks.column(name.removeprefix("task."), where)[: len(groups)]
        elif _base(name) != name and _base(name) in values:
            values[name] = _of_group(columns, name)
        elif name == "errors":
            values[name] = errors_of(sources, table["rollout_id"])
        elif name in table.column_names:
            values.setdefault(name, _known(table[name].combine_chunks(), name))
        elif name not in values:
            raise _unknown(name, where, sources, rollouts)
    return columns


def category_name(name: str) -> str:
    """``name`` as a column of few values: itself where it is one, else the task's field of that name."""
    is_column = name in (*_SHORT, "agents", "errors") or name.startswith(("reward_", "task.")) or _base(name) != name
    return name if is_column and name != "rewards" else f"task.{name}"


def is_of_group(name: str) -> bool:
    """Whether the column is the same for every rollout of a group."""
    return name in _OF_GROUP or name.startswith("task.") or _base(name) != name


def _base(name: str) -> str:
    """The column of rollouts that a column of groups is about; of another, itself."""
    statistic, _, of = name.partition("_")
    is_statistic = statistic in STATISTICS and (of in _NUMBERS or of.startswith("reward_"))
    return of if is_statistic else _COUNTS.get(name, name)


def _of_group(columns: RolloutColumns, name: str) -> pa.Array:
    of = columns.values[_base(name)]
    if name in _COUNTS:
        per_group = np.bincount(columns.groups, weights=of.is_valid().to_numpy(zero_copy_only=False)).astype(np.int64)
    else:
        numbers = of.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        n_groups = int(columns.groups.max()) + 1
        per_group = group_statistic(name.partition("_")[0], numbers, columns.groups, n_groups)
    return pa.array(per_group[columns.groups], from_pandas=True)


def _known(column: pa.Array, name: str) -> pa.Array:
    """Null for NaN; a float32 as the double of its shortest spelling, so that the mean of 0.7 is 0.7."""
    if name == "reward":
        return pa.array(known_rewards(column), from_pandas=True)
    if pa.types.is_float32(column.type):
        spelt = column.dictionary_encode()
        column = spelt.dictionary.cast(pa.string()).cast(pa.float64()).take(spelt.indices)
    return pc.if_else(pc.is_nan(column), None, column) if pa.types.is_floating(column.type) else column


def _unknown(name: str, where: str, sources: Sequence[str | Path], rollouts: Loaded) -> UsageError:
    scores = named_scores(sources, rollouts.columns(["rewards"]))
    shown = [
        *_PLAIN,
        *(f"reward_{score}" for score in scores),
        *(f"task.{path}" for path in sorted(_Tasks(rollouts).names)),
    ]
    numbers = [of for of in shown if of in _NUMBERS or of.startswith("reward_")]
    names = [*shown, *(f"{statistic}_{of}" for of in numbers for statistic in STATISTICS)]
    shown.append(f"{'_, '.join(STATISTICS)}_ before a number's name for its group")
    return unknown_column(name, names, where, shown)


def _in_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, wanted: Mapping[str, str]) -> dict[str, pa.Array]:
    """``wanted`` (name → SQL over the columns of ``schema``) of all rows, in one pass."""
    if not wanted:
        return {}
    with connection("rollouts") as con:
        con.register("given", pa.RecordBatchReader.from_batches(schema, batches))
        columns = ", ".join(f"{sql} AS {name}" for name, sql in wanted.items())
        made = con.sql(f"SELECT {columns} FROM given").to_arrow_table()
    return {name: made[name].combine_chunks() for name in wanted}


def _agents(turns: pa.Array) -> pa.Array:
    ends = np.cumsum(np.append(0, pc.list_value_length(turns).to_numpy(zero_copy_only=False)))
    return pa.ListArray.from_arrays(ends.astype(np.int32), turns.flatten().field("agent"))


class _Tasks:
    """Fields of the tasks' rows, inner ones by dotted path. Each task is decoded once, not once for each of its rollouts."""

    def __init__(self, rollouts: Loaded) -> None:
        batches = (pc.fill_null(batch.column("task"), "") for batch in rollouts.batches(ROLLOUTS, ("task",)))
        encoded = pa.chunked_array([tasks.dictionary_encode() for tasks in batches]).combine_chunks()
        texts = encoded.dictionary.to_pylist()
        self._rows = [object_of(decode(text.encode(), exact=True) if text else None) for text in texts]
        self._indices = encoded.indices
        self.names = {path for row in self._rows for path in _paths(row)}

    def column(self, path: str, where: str) -> pa.Array:
        """A field's values. Raises UsageError where it is no single value, or numbers that cannot be compared."""
        values = [field_at(row, path) for row in self._rows]
        types = {type(value) for value in values if value is not None}
        if not (types <= {int, float} or types in ({bool}, {str})):
            met = ", ".join(sorted({json_kind(value) for value in values if value is not None}))
            raise UsageError.bad_value(where, f"task.{path}", f"a field with one kind of value; tasks have {met}")
        try:
            return pa.array(values, None if types else pa.string(), from_pandas=True).take(self._indices)
        except (pa.ArrowInvalid, OverflowError) as error:
            expected = "integers of at most 64 bits, or of 53 beside fractions"
            raise UsageError.bad_value(where, f"task.{path}", f"{expected} ({error})") from error


def errors_of(sources: Iterable[str | Path], ids: pa.ChunkedArray) -> pa.Array:
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


def _paths(row: Mapping[str, Any], before: str = "") -> Iterable[str]:
    for key, value in row.items():
        yield before + key
        if isinstance(value, dict):
            yield from _paths(value, f"{before}{key}.")
