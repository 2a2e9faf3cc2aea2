"""What an expression can name: columns of rollouts, their texts and rewards, fields of tasks, and facts of groups.

They are those of query's view ``rollouts``, and more: only what is named is read, and token ids never. Of rewards what is
infinite is missing, too; a group column describes the group as in the input, over finite values. ``prompt`` is the contents
of the messages before the model's first, ``text`` those of the model's messages, and ``tool_calls`` the names and arguments
of the model's calls, ``name({…})``, joined by blank lines. ``agents`` made the model calls, and ``errors`` are what failed:
both joined by commas, null where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.commands.filter.conditions import Expression, about, finite
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
_COMPUTED = TEXTS | {"agents": "nullif(array_to_string(list_sort(list_distinct([t.agent FOR t IN turns])), ', '), '')"}
_ERRORS = """SELECT rollout_id, string_agg(kind, ', ' ORDER BY kind) AS errors FROM (
  SELECT DISTINCT rollout_id, CASE kind WHEN 'reward' THEN place ELSE kind END AS kind FROM failures) GROUP BY rollout_id"""
_STRUCTURE = "SELECT json_group_structure(task) FROM (SELECT DISTINCT nullif(task, '')::JSON AS task FROM stored)"
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
#: Reads some columns of all rollouts.
Batches = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]


def evaluate(
    con: Any, expressions: Mapping[str, Expression], sources: Sequence[str | Path], batches: Batches | None = None
) -> dict[str | None, list[Path]]:
    """Make the table ``rows``: ``row``, ``rollout_id``, ``task_id``, ``group_id`` and ``rollout_index`` of each rollout
    under ``sources``, and each of ``expressions`` by its name. All are checked before a row is evaluated. Returns the scores
    that they name, None for the total reward, with the folders of those that are re-scorings.

    ``batches``: the rollouts, where they are in memory, their rewards chosen. Raises UsageError for an expression that names
    an unknown column, is of another kind, that DuckDB cannot evaluate, or that computes with NaN.
    """
    chosen = batches is not None
    batches = batches or (lambda names: (b for source in sources for b in scan_batches(source, AGENTS, names)))
    read = _dataset(batches)
    named = {name: expression.where for expression in expressions.values() for name in expression.names()}
    try:
        with about("; ".join(expression.subject for expression in expressions.values())):
            con.execute(f"CREATE TEMP VIEW stored AS {without_nan(con, registered(con, 'rollouts', [read]))}")
            scored, used = _scores(read, sources, named, chosen)
            _make_view(con, sources, named.keys(), scored)
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
    return used


def _dataset(batches: Batches) -> VerifiedDataset:
    """The rollouts as DuckDB reads them: what it needs of them, and each with its ``row`` from 0."""
    schema = pa.schema([("row", pa.int64()), *(field.with_nullable(True) for field in AGENTS.schema)])

    def groups(names: Sequence[str]) -> Iterator[RowGroup]:
        fields, first = pa.schema([schema.field(name) for name in names]), 0
        for batch in batches([name for name in names if name != "row"] or ["rollout_id"]):
            numbers = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            yield RowGroup.of(batch.append_column("row", pa.array(numbers)).select(fields.names).cast(fields))

    return VerifiedDataset(schema, groups)


def _make_view(
    con: Any, sources: Sequence[str | Path], named: AbstractSet[str], scored: Mapping[str, pa.ChunkedArray]
) -> None:
    """Make the view ``rollouts`` of the columns of rollouts, and of those of groups where another is named."""
    names, known = {name.partition(".")[0] for name in named}, {*AGENTS.schema.names, *_COMPUTED, *scored, "errors"}
    described = {_number_of(name) for name in names - known}
    # DuckDB takes long for long SQL, also for what is not named: all of it is there only to be proposed.
    is_misspelt = not described <= known | {"n_rollouts"}
    columns = {name: sql for name, sql in _COMPUTED.items() if is_misspelt or name in names}
    if "reward" not in scored:
        columns["reward"] = finite("reward")
    if any(name.startswith("task.") for name in named):
        # A field that has several kinds of values is text.
        structure = re.sub('"JSON"(?!:)', '"VARCHAR"', con.execute(_STRUCTURE).fetchall()[0][0]).replace("'", "''")
        columns["task"] = f"from_json(nullif(task, ''), '{structure}')"
    replaced = ", ".join(name for name in AGENTS.schema.names if name in ("turns", "reward", *columns))
    added = ", ".join(f"{sql} AS {name}" for name, sql in columns.items())
    rows = f"SELECT * EXCLUDE ({replaced}), {added} FROM stored"
    if "errors" in names:
        con.register("failures", failures(sources))
        rows = f"SELECT * FROM ({rows}) LEFT JOIN ({_ERRORS}) USING (rollout_id)"
    if scored:
        con.register("scored", pa.table(dict(scored)))
        rows = f"SELECT * FROM ({rows}) LEFT JOIN (SELECT DISTINCT ON (rollout_id) * FROM scored) USING (rollout_id)"
    con.execute(f"CREATE TEMP VIEW each AS {rows}")
    if described:
        each, facts = con.sql("FROM each"), ["count(*) AS n_rollouts", "count(reward) AS n_scored"]
        for number, kind in zip(each.columns, each.types, strict=True):
            if kind.id in _NUMBERS and (is_misspelt or number in described):
                value = finite(f'"{number}"')
                facts += [f'{sql.format(value)} AS "{name}_{number}"' for name, sql in _STATISTICS.items()]
        rows = f"SELECT * FROM each JOIN (SELECT group_id, {', '.join(facts)} FROM each GROUP BY group_id) USING (group_id)"
    con.execute(f"CREATE TEMP VIEW rollouts AS {rows}")


def _scores(
    read: VerifiedDataset, sources: Sequence[str | Path], named: Mapping[str, str], chosen: bool
) -> tuple[dict[str, pa.ChunkedArray], dict[str | None, list[Path]]]:
    """The scores that are named, as columns beside ``rollout_id``: ``reward_NAME`` each, and ``reward`` where that is not
    the stored one; and the folders of each by its name."""
    columns, used = dict[str, pa.ChunkedArray](), dict[str | None, list[Path]]()
    of = {_number_of(name): where for name, where in named.items()}
    wanted = {column: column.removeprefix("reward_") for column in of if column.startswith("reward_")}
    if "reward" in map(str.lower, of) and not chosen:
        only, _ = default_score(sources, None, "reward_NAME in the condition")
        if only is None:
            used[None] = []
        else:
            warn(f"reward is the score {only!r}, the only re-scoring (reward_{TOTAL}: the total reward of collect)")
            wanted = {"reward": only, **wanted}
    if wanted:
        rows = read.scanner(["rollout_id", "reward", "rewards"]).to_reader().read_all()
        columns["rollout_id"] = rows["rollout_id"]
    for column, name in wanted.items():
        where = of.get(column, "reward")
        if column.lower() in map(str.lower, columns):
            raise UsageError.bad_value(where, column, "one of the scores whose names differ in case only")
        _, columns[column], used[name] = scores_of(sources, rows, name, where.strip("-").replace("-", "_"))
    return columns, used


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
