"""What an expression can name: columns of rollouts, their texts and rewards, fields of tasks, and facts of groups.

They are those of query's view ``rollouts``, and more: only what is named is read, and token ids never. Of rewards what is
infinite is missing, too; a group column describes the group as in the input, over finite values. ``prompt`` is the contents
of the messages before the model's first, ``text`` those of the model's messages, and ``tool_calls`` the names and arguments
of the model's calls, ``name({…})``, joined by blank lines. ``agents`` made the model calls, and ``errors`` are what failed:
both joined by commas, null where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.commands.filter.conditions import Expression, about
from gymdata.commands.query.views import failures, registered, without_nan
from gymdata.errors import UsageError, counted
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.schema import AGENTS
from gymdata.scores.chosen import default_score, scores_of
from gymdata.store import scan_batches
from gymdata.store.partial_reads import RowGroup, VerifiedDataset
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
_AGENTS = "nullif(array_to_string(list_sort(list_distinct([t.agent FOR t IN turns])), ', '), '')"
_ERRORS = """SELECT rollout_id, string_agg(kind, ', ' ORDER BY kind) AS errors FROM (
  SELECT DISTINCT rollout_id, CASE kind WHEN 'reward' THEN place ELSE kind END AS kind FROM failures) GROUP BY rollout_id"""
_FINITE = 'CASE WHEN isfinite("{0}"::DOUBLE) THEN "{0}"::DOUBLE END'
#: Of the finite values of a group. Sorted, because the order of sums changes their last bit.
_STATISTICS = {
    "mean": "CASE WHEN min({0}) = max({0}) THEN min({0}) ELSE avg({0} ORDER BY {0}) END",
    "min": "min({0})",
    "max": "max({0})",
    "std": "nullif(stddev_samp({0} ORDER BY {0}), 'nan')",
    "sum": "sum({0} ORDER BY {0})",
}
_NUMBERS = ("integer", "bigint", "float", "double")
#: The same for every rollout of a group, as are the fields of its task.
_OF_GROUP = ("group_id", "task_id", "policy", "policy_hash", "policy_version", "task", "n_rollouts", "n_scored")


def dataset_of(batches: Callable[[Sequence[str]], Iterable[pa.RecordBatch]]) -> VerifiedDataset:
    """Rollouts that DuckDB reads as it needs them, each with its ``row`` from 0, and with the agents alone of turns.
    ``batches``: columns of these names of all of them."""
    schema = pa.schema([("row", pa.int64()), *AGENTS.schema])

    def groups(names: Sequence[str]) -> Iterator[RowGroup]:
        stored, first = [name for name in names if name != "row"] or ["rollout_id"], 0
        fields = [schema.field(name) for name in names]
        for batch in batches(stored):
            values = dict(
                zip(stored, batch.columns, strict=True), row=pa.array(np.arange(first, first + batch.num_rows))
            )
            first += batch.num_rows
            columns = [values[field.name].cast(field.type) for field in fields]
            yield RowGroup.of(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))

    return VerifiedDataset(schema, groups)


@dataclass
class Scores:
    """The scores that expressions name. ``names``: None is the total reward; ``files``: those of re-scorings that were read;
    ``columns``: the values of the rollouts, by ``rollout_id``."""

    names: list[str | None] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    columns: dict[str, pa.ChunkedArray] = field(default_factory=dict)


def evaluate(
    con: Any, expressions: Mapping[str, Expression], sources: Sequence[str | Path], read: VerifiedDataset | None = None
) -> Scores:
    """Make the table ``rows``: ``row``, ``rollout_id``, ``task_id``, ``group_id`` and ``rollout_index`` of each rollout
    under ``sources``, and each of ``expressions`` by its name. All are checked before a row is evaluated.

    ``read``: where they are in memory, their rewards chosen. Raises UsageError for an expression that names an unknown
    column, is of another kind, that DuckDB cannot evaluate, or that computes with NaN.
    """
    chosen = read is not None
    read = read or dataset_of(lambda names: (b for source in sources for b in scan_batches(source, AGENTS, names)))
    named = {name: expression.where for expression in expressions.values() for name in expression.names()}
    try:
        with about("; ".join(expression.subject for expression in expressions.values())):
            stored = without_nan(con, registered(con, "rollouts", [read]))
            con.execute(f"CREATE TEMP VIEW stored AS {stored}")
            scores = _scores(read, sources, named, chosen)
            _make_view(con, sources, named, scores)
            nan = {name: expression.check(con) for name, expression in expressions.items()}
            made = "".join(f", {e.sql} AS {name}, {nan[name]} AS nan_{name}" for name, e in expressions.items())
            keys = "row, rollout_id, task_id, group_id, rollout_index"
            con.execute(f"CREATE TEMP TABLE rows AS SELECT {keys}{made} FROM rollouts")
    except UsageError as error:
        raise read.fault or error from error.__cause__
    for name, expression in expressions.items():
        if n := con.execute(f"SELECT count(*) FROM rows WHERE nan_{name}").fetchall()[0][0]:
            hint = "CASE WHEN … THEN … END leaves these out"
            raise UsageError(f"{expression.subject}: computes with NaN for {counted(n, 'rollout')}", hint=hint)
    return scores


def _make_view(con: Any, sources: Sequence[str | Path], named: Collection[str], scores: Scores) -> None:
    """Make the view ``rollouts`` of the columns of rollouts, and of those of groups where another is named."""
    names, computed = {name.partition(".")[0] for name in named}, TEXTS | {"agents": _AGENTS}
    known = {*AGENTS.schema.names, *computed, *scores.columns, "errors"}
    of_groups, is_misspelt = names - known, not set(map(_number_of, names)) <= known | {"n_rollouts"}
    # DuckDB takes long for long SQL, also for what is not named: all of it is there only to be proposed.
    columns = {name: sql for name, sql in computed.items() if is_misspelt or name in names}
    replaced = ["turns", "reward"]
    if "reward" not in scores.columns:
        columns["reward"] = _FINITE.format("reward")
    if any(name.startswith("task.") for name in named):
        sql = "SELECT json_group_structure(task) FROM (SELECT DISTINCT nullif(task, '')::JSON AS task FROM stored)"
        # A field that has several kinds of values is text.
        structure = re.sub('"JSON"(?!:)', '"VARCHAR"', con.execute(sql).fetchall()[0][0]).replace("'", "''")
        columns["task"] = f"from_json(nullif(task, ''), '{structure}')"
        replaced.append("task")
    added = ", ".join(f"{sql} AS {name}" for name, sql in columns.items())
    rows = f"SELECT * EXCLUDE ({', '.join(replaced)}), {added} FROM stored"
    if "errors" in named:
        con.register("failures", failures(sources))
        rows = f"SELECT * FROM ({rows}) LEFT JOIN ({_ERRORS}) USING (rollout_id)"
    if scores.columns:
        con.register("scored", pa.table(scores.columns))
        rows = f"SELECT * FROM ({rows}) LEFT JOIN (SELECT DISTINCT ON (rollout_id) * FROM scored) USING (rollout_id)"
    con.execute(f"CREATE TEMP VIEW each AS {rows}")
    if of_groups:
        each, described = con.sql("FROM each"), set(map(_number_of, of_groups))
        facts = ["count(*) AS n_rollouts", "count(reward) AS n_scored"]
        for number, kind in zip(each.columns, each.types, strict=True):
            if kind.id in _NUMBERS and (is_misspelt or number in described):
                value = _FINITE.format(number)
                facts += [f'{sql.format(value)} AS "{name}_{number}"' for name, sql in _STATISTICS.items()]
        groups = f"SELECT group_id, {', '.join(facts)} FROM each GROUP BY group_id"
        rows = f"SELECT * FROM each JOIN ({groups}) USING (group_id)"
    con.execute(f"CREATE TEMP VIEW rollouts AS {rows}")


def _scores(read: VerifiedDataset, sources: Sequence[str | Path], named: Mapping[str, str], chosen: bool) -> Scores:
    """The scores that are named: ``reward_NAME`` each, and ``reward`` where that is not the stored one."""
    scores, of = Scores(), {_number_of(name): where for name, where in named.items()}
    wanted = {column: column.removeprefix("reward_") for column in of if column.startswith("reward_")}
    if "reward" in map(str.lower, of) and not chosen:
        only, _ = default_score(sources, None, "reward_NAME in the condition")
        if only is None:
            scores.names.append(None)
        else:
            warn(f"reward is the score {only!r}, the only re-scoring (reward_{TOTAL}: the total reward of collect)")
            wanted = {"reward": only, **wanted}
    if wanted:
        rows = read.scanner(["rollout_id", "reward", "rewards"]).to_reader().read_all()
        scores.columns["rollout_id"] = rows["rollout_id"]
    for column, name in wanted.items():
        where = of.get(column, "reward")
        if column.lower() in map(str.lower, scores.columns):
            raise UsageError.bad_value(where, column, "one of the scores whose names differ in case only")
        _, scores.columns[column], files = scores_of(sources, rows, name, where.strip("-").replace("-", "_"))
        scores.files += [file for file in files if file not in scores.files]
        scores.names.append(name)
    return scores


def category_name(name: str) -> str:
    """``name`` as a column of few values: itself where it is one, else the task's field of that name."""
    is_column = name in (*AGENTS.schema.names, "agents", "errors") or name.startswith(("reward_", "task."))
    return name if is_column or is_of_group(name) else f"task.{name}"


def is_of_group(name: str) -> bool:
    """Whether the column is the same for every rollout of a group."""
    return name in _OF_GROUP or name.startswith("task.") or name.partition("_")[0] in _STATISTICS


def _number_of(name: str) -> str:
    """The column that a column of groups is about; of another, itself."""
    statistic, _, of = name.partition("_")
    return "reward" if name == "n_scored" else of if statistic in _STATISTICS else name
