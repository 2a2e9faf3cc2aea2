"""What a condition can name: columns of rollouts, their texts and rewards, fields of their tasks, and facts of their groups.

Only what is named is read, and token ids never; a number is a double (a float32 by its shortest spelling,
so ``temperature == 0.7`` is true of what was sampled at 0.7), or an integer that a double would round; NaN is missing;
a group column describes the group as in the input. ``prompt`` is the contents of the messages before the model's first,
``text`` those of the model's messages, and ``tool_calls`` the names and arguments of the model's calls, ``name({…})``,
joined by blank lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, UsageError, json_kind
from gymdata.filter.conditions import (
    COUNTS,
    NUMBERS,
    RECORDED,
    SCALARS,
    TEXTS,
    Kind,
    is_number,
    may_be_column,
    unknown_column,
)
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.messages import field_at, joined_calls, joined_contents, object_of, split_messages
from gymdata.rollouts.schema import AGENTS, ROLLOUTS, Table
from gymdata.scores.chosen import default_score, named_scores, scores_of, with_score
from gymdata.stats import STATISTICS, group_statistic, known_rewards
from gymdata.store import read_failures, read_table, scan_batches
from gymdata.store.lineage import refuse_duplicates
from gymdata.store.lines import decode
from gymdata.store.reading import warn

_ALWAYS = ("rollout_id", "task_id", "group_id", "rollout_index")
#: The same for every rollout of a group.
_OF_GROUP = ("group_id", "task_id", "policy", "policy_hash", "policy_version")
_KINDS: dict[type, Kind] = {bool: "boolean", int: "number", float: "number", str: "text"}


@dataclass
class RolloutColumns:
    """One entry per rollout for every named column. ``scored_by``: files of re-scorings that were read for it; ``scores``:
    the names of the scores, None for the total reward."""

    table: pa.Table
    values: dict[str, pa.Array] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    of_group: set[str] = field(default_factory=set)
    scored_by: list[Path] = field(default_factory=list)
    scores: list[str | None] = field(default_factory=list)
    #: Each row's group as a code from 0.
    groups: Any = None

    def numbers(self, name: str) -> Any:
        """A numeric column as float64, NaN where it is missing."""
        return self.values[name].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rollouts that are in memory already: ``columns`` and ``batches`` give the columns of some names. Batches may have
    fields that the table is ``without``."""

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
    plain = [name for name in named if name in SCALARS]
    under = [name.partition("_")[2] for name in named if name.partition("_")[0] in STATISTICS]
    rewards = [name for name in (*named, *under) if name.startswith("reward_")]
    unknown = [name for name in named if not may_be_column(name)]
    needed = {*_ALWAYS, *plain, *(n for n in under if n in NUMBERS)}
    if rewards or unknown or "n_scored" in named:
        needed |= {"reward", "rewards"}
    by_reward = rollouts is None and ("reward" in (*plain, *under) or "n_scored" in named)
    only = default_score(sources, None, "reward_NAME in the condition")[0] if by_reward else None
    rollouts = rollouts or Loaded(
        lambda names: pa.concat_tables([read_table(path, ROLLOUTS, names) for path in sources]),
        lambda table, names: (batch for path in sources for batch in scan_batches(path, table, names)),
    )
    table = rollouts.columns([n for n in ROLLOUTS.schema.names if n in needed])
    if not table.num_rows:
        raise DataError.empty(sources[0], "rollouts")
    refuse_duplicates(table, sources)
    columns = RolloutColumns(table, scores=[only] if by_reward else [])
    if only is not None:
        warn(f"reward is the score {only!r}, the only re-scoring (reward_{TOTAL}: the total reward of collect)")
        # Beside the table, in which reward_reward finds the total reward.
        scored, columns.scored_by = with_score(sources, table, only)
        columns.values["reward"], columns.kinds["reward"] = _plain(scored["reward"].combine_chunks(), "reward")
    columns.groups = table["group_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    tasks = _TaskFields(rollouts, [name.removeprefix("task.") for name in named if name.startswith("task.")])
    if unknown:
        plain_names = [
            *SCALARS,
            *TEXTS,
            *RECORDED,
            *(f"reward_{name}" for name in named_scores(sources, table)),
            *COUNTS,
        ]
        plain_names += [f"task.{name}" for name in tasks.names()]
        names = [*plain_names, *(f"{stat}_{of}" for of in plain_names if is_number(of) for stat in STATISTICS)]
        shown = [*plain_names, f"{'_, '.join(STATISTICS)}_ before a number's name for its group"]
        raise unknown_column(unknown[0], names, named[unknown[0]], shown)
    if texts := [name for name in TEXTS if name in named]:
        columns.kinds |= dict.fromkeys(texts, "text")
        parts: dict[str, list[pa.Array]] = {name: [] for name in texts}
        for batch in rollouts.batches(ROLLOUTS, ("messages", "n_turns")):
            opening, completion = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
            for name, joined in parts.items():
                if name == "tool_calls":
                    text = joined_calls(completion)
                else:
                    text = joined_contents(opening) if name == "prompt" else joined_contents(completion, "assistant")
                joined.append(text.cast(pa.large_string()))
        # More rows may have been collected since the others were read.
        columns.values |= {name: pa.concat_arrays(joined).slice(0, table.num_rows) for name, joined in parts.items()}
    if "agents" in named:
        columns.values["agents"], columns.kinds["agents"] = agents_of(rollouts).slice(0, table.num_rows), "text"
    for name, where in named.items():
        _add(columns, name, where, sources, tasks)
    return columns


def agents_of(rollouts: Loaded) -> pa.Array:
    """The agents that made the model calls of each rollout, in alphabetical order; null where no call names one."""
    by_batch = [pa.array([], pa.string())]
    for batch in rollouts.batches(AGENTS, ("turns",)):
        turns = batch.column("turns")
        row = np.repeat(np.arange(batch.num_rows), pc.list_value_length(turns).to_numpy(zero_copy_only=False))
        calls = pa.table({"row": row, "agent": turns.flatten().field("agent")})
        calls = calls.filter(pc.is_valid(calls["agent"])).group_by(["row", "agent"]).aggregate([])
        ordered = calls.sort_by([("row", "ascending"), ("agent", "ascending")])
        by_row = ordered.group_by("row", use_threads=False).aggregate([("agent", "list")])
        joined = pc.binary_join(by_row["agent_list"].combine_chunks(), ", ")
        indices = pc.index_in(pa.array(np.arange(batch.num_rows)), value_set=by_row["row"].combine_chunks())
        by_batch.append(joined.take(indices))
    return pa.concat_arrays(by_batch)


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


def category_name(name: str) -> str:
    """``name`` as a column: itself where it is one, else the task's field of that name."""
    return name if may_be_column(name) and name not in TEXTS else f"task.{name}"


def _add(columns: RolloutColumns, name: str, where: str, sources: Sequence[str | Path], tasks: _TaskFields) -> None:
    if name not in columns.values:
        columns.values[name], columns.kinds[name] = _column(columns, name, where, sources, tasks)


def _column(
    columns: RolloutColumns, name: str, where: str, sources: Sequence[str | Path], tasks: _TaskFields
) -> tuple[pa.Array, Kind]:
    table = columns.table
    if name in _OF_GROUP or name.startswith("task."):
        columns.of_group.add(name)
    if name.startswith("task."):
        values, kind = tasks.column(name.removeprefix("task."), where)
        return values.slice(0, table.num_rows), kind  # more rows may have been collected since
    if name in SCALARS:
        return _plain(table[name].combine_chunks(), name)
    if name == "errors":
        return errors_of(sources, table["rollout_id"]), "text"
    if name.startswith("reward_"):
        score_names = [TOTAL, *named_scores(sources, table)]
        if name.removeprefix("reward_") not in score_names:
            raise unknown_column(name, [*(f"reward_{n}" for n in score_names), *SCALARS], where)
        _, values, scored_by = scores_of(sources, table, name.removeprefix("reward_"))
        columns.scored_by += [path for path in scored_by if path not in columns.scored_by]
        columns.scores.append(name.removeprefix("reward_"))
        return pa.array(values.to_numpy(), pa.float64(), from_pandas=True), "number"
    columns.of_group.add(name)
    if name in COUNTS:
        counted = np.ones(table.num_rows, bool)
        if name == "n_scored":
            _add(columns, "reward", where, sources, tasks)
            counted = np.isfinite(columns.numbers("reward"))
        per_group = np.bincount(columns.groups, weights=counted).astype(np.float64)
    else:
        statistic, _, of = name.partition("_")
        _add(columns, of, where, sources, tasks)
        per_group = group_statistic(statistic, columns.numbers(of), columns.groups, int(columns.groups.max()) + 1)
    return pa.array(per_group[columns.groups], pa.float64(), from_pandas=True), "number"


def _plain(column: pa.Array, name: str) -> tuple[pa.Array, Kind]:
    if name == "started_at":
        return pc.strftime(column, format="%Y-%m-%dT%H:%M:%SZ"), "text"
    if pa.types.is_string(column.type):
        return column, "text"
    if pa.types.is_float32(column.type):
        spelt, codes = np.unique(column.to_numpy(zero_copy_only=False), return_inverse=True)
        exact = np.array([float(str(value)) for value in spelt])
        return pa.array(exact[codes], pa.float64(), from_pandas=True), "number"
    if name == "reward":
        return pa.array(known_rewards(column), from_pandas=True), "number"
    return _exact(column), "number"


def _exact(numbers: pa.Array) -> pa.Array:
    """As doubles, NaN as null; integers that a double would round, such as ids and hashes, as they are."""
    if pa.types.is_integer(numbers.type):
        try:
            return numbers.cast(pa.float64())
        except pa.ArrowInvalid:
            return numbers.cast(pa.int64())
    return pa.array(numbers.to_numpy(zero_copy_only=False), pa.float64(), from_pandas=True)


class _TaskFields:
    """Fields of the tasks' rows, all requested ones read in one pass."""

    def __init__(self, rollouts: Loaded, paths: Iterable[str]) -> None:
        self._rollouts = rollouts
        self._paths = list(dict.fromkeys(paths))
        self._values: dict[str, list[Any]] | None = None
        self._field_names: dict[str, None] = {}

    def names(self) -> list[str]:
        """Every field that some task has, inner ones by dotted path."""
        self._read()
        return sorted(self._field_names)

    def column(self, path: str, where: str) -> tuple[pa.Array, Kind]:
        """A field's values and their kind. Raises UsageError when no task has it, or it is no single value."""
        values = self._read()[path]
        types = {type(value) for value in values if value is not None}
        if not types and path not in self._field_names:
            raise unknown_column(f"task.{path}", [f"task.{name}" for name in self.names()], where)
        kinds = {_KINDS[value_type] for value_type in types if value_type in _KINDS}
        if not types <= _KINDS.keys() or len(kinds) > 1:
            met = ", ".join(sorted({json_kind(value) for value in values if value is not None}))
            raise UsageError.bad_value(where, f"task.{path}", f"a field with one kind of value; tasks have {met}")
        kind: Kind = next(iter(kinds), "text")
        if kind == "number":
            try:
                return _exact(pa.array(values, from_pandas=True)), kind
            except (pa.ArrowInvalid, OverflowError) as error:
                expected = "integers of at most 64 bits, or of 53 beside fractions"
                raise UsageError.bad_value(where, f"task.{path}", f"{expected} ({error})") from error
        return pa.array(values, pa.bool_() if kind == "boolean" else pa.string()), kind

    def _read(self) -> dict[str, list[Any]]:
        if self._values is not None:
            return self._values
        self._values = {path: [] for path in self._paths}
        for batch in self._rollouts.batches(ROLLOUTS, ("task",)):
            # Each task is decoded once, not once for each of its rollouts.
            encoded = batch.column("task").dictionary_encode(null_encoding="encode")
            tasks = [
                object_of(decode(text.encode(), exact=True) if text else None)
                for text in encoded.dictionary.to_pylist()
            ]
            for task in tasks:
                self._field_names |= dict.fromkeys(_paths(task))
            for path, values in self._values.items():
                of_task = [field_at(task, path) for task in tasks]
                values += map(of_task.__getitem__, encoded.indices.to_pylist())
        return self._values


def _paths(row: Mapping[str, Any], before: str = "") -> Iterable[str]:
    for key, value in row.items():
        yield before + key
        if isinstance(value, dict):
            yield from _paths(value, f"{before}{key}.")
