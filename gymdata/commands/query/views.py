"""gymdata's files as DuckDB views: rollouts, turns, messages, failures, and the tables that stages wrote.

Invariants: SQL can read the given files and nothing else, and can change nothing; no value is shown of a file
that is damaged or was changed; a stored NaN is NULL, but inside of ``rollouts.turns``, whose
digests hold it; views over Parquet are lazy, so a query reads the columns that it names;
``turns.prompt_token_ids`` is the prompt that the model read, digests checked.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError, GymdataError, UsageError, counted
from gymdata.rollouts.schema import ROLLOUTS, TABLES
from gymdata.store.fetch import fetched
from gymdata.store.formats import tables_in
from gymdata.store.journal import FAILURES
from gymdata.store.paths import RUN_JSON, Source, matches, read_facts
from gymdata.store.reading import check_source, warn

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_ALWAYS = ("rollouts", "turns", "messages", "failures")
_UDF = "gymdata_prompts"
_UDF_FIELDS = {
    "parent": "INTEGER",
    "prefix_length": "INTEGER",
    "prompt_delta_ids": "INTEGER[]",
    "generation_token_ids": "INTEGER[]",
    "generation_log_probs": "FLOAT[]",
    "digest": "BIGINT",
}
_REBUILT = (
    f"{_UDF}(list_transform(turns, lambda x: {{{', '.join(f'{name}: x.{name}' for name in _UDF_FIELDS)}}}), rollout_id)"
)
#: What may mean all columns of a view; ``FROM rollouts`` and ``TABLE rollouts`` do so without a star.
_ALL_COLUMNS = re.compile(
    r"\*(?!\s*\))|columns|describe|summarize|\bshow\b"
    r"|(?:^|[(;]|\b(?:all|union|except|intersect|name))\s*(?:from|table)\b"
)
_KEYS = "rollout_id, run_id, task_id, group_id, rollout_index"
_FAILURE_TEXT = ("kind", "place", "message", "rollout_id", "run_id", "group_id", "task_id", "at", "turns", "messages")


@dataclass
class Files:
    """Which files hold which table, and the folders whose failures.jsonl belongs to them."""

    by_table: dict[str, list[Source]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)


def find_files(paths: Sequence[str | Path]) -> Files:
    """The tables under path arguments: run folders (with their stages), stage folders, files and globs of these.

    Raises UsageError for a file that is given twice, also by two ways, DataError for a path that is not there or holds no
    table of gymdata.
    """
    files = Files()
    for path in map(fetched, paths):
        for name, sources in tables_in(path).items():
            files.by_table.setdefault(name, []).extend(sources)
        files.folders += [match for match in matches(path) if match.is_dir()]
    tables, given = [source.path for sources in files.by_table.values() for source in sources], set[Path]()
    for path in (*files.folders, *tables):
        if (real := path.resolve()) in given:
            raise UsageError(f"{path} is given twice", hint="give each file once")
        given.add(real)
    for path in tables:
        check_source(path)
    for folder in files.folders:
        run_json = folder / RUN_JSON
        # A run may be without rows yet.
        if (folder / ROLLOUTS.name).is_dir() or (run_json.is_file() and read_facts(run_json).get("attempts")):
            files.by_table.setdefault(ROLLOUTS.name, [])
    if not files.by_table and not any((f / FAILURES).is_file() for f in files.folders):
        raise DataError.empty(paths[0], "rows of a gymdata table")
    return files


@contextlib.contextmanager
def open_views(files: Files, database: Path | None = None) -> Iterator[Views]:
    """``Views`` on a connection of their own. ``database``: the file that ``Views.store`` makes, for any DuckDB client."""
    import duckdb

    # For this alone: DuckDB lets SQL read all that is in it.
    with tempfile.TemporaryDirectory(prefix="gymdata-query-") as spill:
        off = ("python_enable_replacements", "autoload_known_extensions", "autoinstall_known_extensions")
        config: Any = {"temp_directory": spill, **dict.fromkeys(off, False)}
        with duckdb.connect(database or ":memory:", config=config) as con:
            try:
                yield Views(con, files, is_file=database is not None)
            finally:
                # Left registered, the function makes DuckDB's bindings complain on stderr when the process ends. What
                # ended the block is reported, not that there is none or that a result is open.
                with contextlib.suppress(duckdb.Error):
                    con.remove_function(_UDF)


class Views:
    """The views of ``files`` on a DuckDB connection, made when ``prepare`` or ``store`` says which."""

    def __init__(self, con: duckdb.DuckDBPyConnection, files: Files, *, is_file: bool) -> None:
        self.con, self.files = con, files
        always = _ALWAYS if ROLLOUTS.name in files.by_table else ("failures",) if files.folders else ()
        self.names: tuple[str, ...] = tuple(dict.fromkeys((*always, *files.by_table)))
        self._is_file = is_file
        self._fault: DataError | None = None
        self._scanned: list[Any] = []

    @property
    def fault(self) -> GymdataError | None:
        """A gymdata error that was raised inside DuckDB, which keeps only its text."""
        return self._fault or next((data.fault for data in self._scanned if data.fault is not None), None)

    def prepare(self, sql: str) -> None:
        """Make the views that ``sql`` names (all, when it names none), then lock everything else out.

        What costs to find out, reward names and prompts, is looked at only when the text can need it.
        """
        text = sql.lower()
        named = [name for name in self.names if re.search(rf"\b{name}\b", text)] or self.names
        everything = _ALL_COLUMNS.search(text) is not None
        rewards, prompts = (everything or word in text for word in ("reward_", "prompt_token_ids"))
        self._make(named, rewards=rewards, prompts=prompts)
        self._warn_of_repeats(named)
        lock(self.con)

    def store(self) -> None:
        """Write all views to the database. Parquet stays where it is, what is in other files is copied."""
        self._make(self.names, rewards=True, prompts=True)

    def _make(self, names: Iterable[str], *, rewards: bool, prompts: bool) -> None:
        tables = dict.fromkeys(ROLLOUTS.name if name in ("turns", "messages") else name for name in names)
        for name in tables:
            rows = self._rows(name)
            named = _named_rewards(self.con, rows) if rewards and name == ROLLOUTS.name else ""
            self._create(name, f"SELECT *{named} FROM ({rows})")
        if "turns" in names:
            if prompts and not self._is_file:
                self._register_prompts()
            rebuilt = _PROMPTS if self._is_file else _REBUILT
            unnested, shown = (f", unnest({rebuilt}) AS p", ", p AS prompt_token_ids") if prompts else ("", "")
            self._create("turns", _TURNS.format(prompts=unnested, shown=shown))
        if "messages" in names:
            self._create("messages", _MESSAGES)
        self.con.execute(_FIND_IDS)

    def _create(self, name: str, sql: str) -> None:
        self.con.execute(f"CREATE VIEW {name} AS {without_nan(self.con, sql)}")

    def _rows(self, name: str) -> str:
        """SQL of the rows of a table."""
        if name == "failures":
            return self._registered(name, [failures(self.files.folders)])
        from gymdata.store.tables import read_source

        sources, table = self.files.by_table[name], TABLES[name]
        files = [source.path.resolve() for source in sources if source.kind == "parquet"]
        data: list[Any] = [read_source(source, table, None) for source in sources if source.kind != "parquet"]
        if self._is_file and files:
            names_of_files = ", ".join(_text(escape(str(file))) for file in files)
            parquet = f"SELECT * FROM read_parquet([{names_of_files}], union_by_name = true)"
            return " UNION ALL BY NAME ".join([parquet, *([self._registered(name, data)] if data else [])])
        if files:
            # It loads pandas, where that is installed: half of the time that a query of JSON lines takes to begin.
            from gymdata.store.partial_reads import VerifiedDataset

            # DuckDB's own reader ignores checksums and trusts a file's statistics.
            scanned = VerifiedDataset.of_files(files, table)
            self._scanned.append(scanned)
            data = [scanned, *data]
        return self._registered(name, data or [table.arrow.empty_table()])

    def _registered(self, name: str, parts: Sequence[Any]) -> str:
        if not self._is_file:
            return registered(self.con, name, parts)
        self.con.execute(f"CREATE TABLE gymdata_{name} AS {registered(self.con, 'copied', parts)}")
        return f"SELECT * FROM gymdata_{name}"

    def _warn_of_repeats(self, names: Iterable[str]) -> None:
        """Rollouts that several paths give are counted as often."""
        is_named = not {"rollouts", "turns", "messages"}.isdisjoint(names)
        if is_named and len({source.path.parent for source in self.files.by_table.get("rollouts", ())}) > 1:
            repeated = self.con.execute(
                "SELECT count(*), min(rollout_id) FROM (SELECT rollout_id FROM rollouts GROUP BY 1 HAVING count(*) > 1)"
            ).fetchone()
            if repeated is not None and repeated[0]:
                warn(
                    f"{counted(repeated[0], 'rollout is', 'rollouts are')} there more than once (first: "
                    f"{repeated[1]}): their rows are counted as often"
                )

    def _register_prompts(self) -> None:
        import numpy as np
        import pyarrow as pa

        from gymdata.rollouts.turn_columns import with_prompts

        def prompts(turns: Any, rollout_ids: Any) -> Any:
            turns, rollout_ids = (
                x if isinstance(x, pa.ChunkedArray) else pa.chunked_array([x]) for x in (turns, rollout_ids)
            )
            try:
                expanded = with_prompts(turns, rollout_ids).combine_chunks()
            except DataError as error:
                self._fault = error
                raise
            lists = expanded.flatten().field("prompt_token_ids")
            offsets = expanded.offsets.to_numpy()
            return pa.ListArray.from_arrays((offsets - offsets[0]).astype(np.int32), lists)

        fields = ", ".join(f"{name} {kind}" for name, kind in _UDF_FIELDS.items())
        # The stubs know only the types that DuckDB has by name, not the text of a nested one.
        create: Any = self.con.create_function
        create(_UDF, prompts, [f"STRUCT({fields})[]", "VARCHAR"], "INTEGER[][]", type="arrow")


def lock(con: duckdb.DuckDBPyConnection) -> None:
    """From now on SQL on ``con`` can only read what is registered, no file (but DuckDB's own for what does not fit in
    memory) and no network, and cannot change settings."""
    con.execute("SET enable_external_access=false")
    con.execute("SET lock_configuration=true")


def error_message(error: duckdb.Error) -> str:
    """What DuckDB says, without the line of the statement."""
    return " ".join(str(error).partition("\n\nLINE")[0].split())


def registered(con: duckdb.DuckDBPyConnection, name: str, parts: Sequence[Any]) -> str:
    """SQL of the rows of ``parts``, tables and datasets of Arrow that are read where they are."""
    names = [f"gymdata_{name}_{number}" for number in range(len(parts))]
    for part, data in zip(names, parts, strict=True):
        con.register(part, data)
    return " UNION ALL BY NAME ".join(f"SELECT * FROM {part}" for part in names)


def without_nan(con: duckdb.DuckDBPyConnection, sql: str) -> str:
    """``sql`` with NULL for NaN, which DuckDB sorts above all numbers and which makes every mean NaN; but not in turns,
    whose digests hold it."""
    rows = con.sql(sql)
    columns = [(quoted(name), kind) for name, kind in zip(rows.columns, rows.types, strict=True) if name != "turns"]
    replaced = [f"{_known(name, kind)} AS {name}" for name, kind in columns if _known(name, kind) != name]
    return f"SELECT * REPLACE ({', '.join(replaced)}) FROM ({sql})" if replaced else sql


def _named_rewards(con: duckdb.DuckDBPyConnection, rows: str) -> str:
    """SQL of a column ``reward_NAME`` for each name. SQL ignores case: names that differ only in case are numbered."""
    names = f"""SELECT name, name || CASE WHEN count(*) OVER (PARTITION BY lower(name)) > 1
    THEN '_' || row_number() OVER (PARTITION BY lower(name) ORDER BY name) ELSE '' END
  FROM (SELECT DISTINCT unnest(rewards).name AS name FROM ({rows})) WHERE name IS NOT NULL ORDER BY name"""
    return "".join(
        f", list_filter(rewards, lambda r: r.name = {_text(name)})[1].value AS {quoted(f'reward_{shown}')}"
        for name, shown in con.execute(names).fetchall()
    )


def quoted(name: str) -> str:
    """``name`` as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def _known(sql: str, kind: Any) -> str:
    """``sql``, a value of the DuckDB type ``kind``, with NULL for each NaN in it."""
    if kind.id in ("float", "double"):
        # Not isnan: there DuckDB's reader of Parquet believes a file's statistics, which know nothing of NaN.
        return f"CASE WHEN isfinite({sql}) OR isinf({sql}) THEN {sql} END"
    if kind.id == "list" and (inner := _known("x", kind.child)) != "x":
        return f"list_transform({sql}, lambda x: {inner})"
    if kind.id == "struct":
        fields = [(name, f"{sql}.{quoted(name)}", child) for name, child in kind.children]
        packed = [f"{_text(name)}: {_known(field, child)}" for name, field, child in fields]
        if packed != [f"{_text(name)}: {field}" for name, field, _ in fields]:
            return "{" + ", ".join(packed) + "}"
    return sql


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


#: Where a sequence of ids occurs in the generations of a rollout's turns: a list of {turn, position}.
_FIND_IDS = """CREATE MACRO find_ids(turns, ids) AS CASE WHEN len(ids) = 0 THEN [] ELSE flatten(list_transform(
  turns, lambda t, k: list_transform(
    list_filter(range(1, len(t.generation_token_ids) - len(ids) + 2),
      lambda i: t.generation_token_ids[i] = ids[1] AND t.generation_token_ids[i:i + len(ids) - 1] = ids),
    lambda i: {turn: k - 1, position: i - 1}))) END"""

#: The prompts of a rollout's turns in DuckDB alone: each is the start of its parent's tokens (p, then g), then its delta.
_PROMPTS = """list_transform(list_reduce(list_transform(turns, lambda t:
    [{k: [t.parent, t.prefix_length]::INTEGER[], p: t.prompt_delta_ids, g: t.generation_token_ids}]),
  lambda done, t: list_append(done, {k: t[1].k, p: list_concat(CASE WHEN t[1].k[1] < 0 THEN []::INTEGER[] ELSE
    list_concat(done[t[1].k[1] + 1].p, done[t[1].k[1] + 1].g)[:t[1].k[2]] END, t[1].p), g: t[1].g}), []), lambda t: t.p)"""

_TURNS = f"""SELECT {_KEYS}, turn, t.*{{shown}} FROM (
  SELECT {_KEYS}, unnest(range(len(turns)))::INTEGER AS turn, unnest(turns) AS t{{prompts}} FROM rollouts)"""
_MESSAGES = f"""SELECT {_KEYS}, position, m.* FROM (
  SELECT {_KEYS}, unnest(range(len(messages)))::INTEGER AS position, unnest(messages) AS m FROM rollouts)"""


def failures(paths: Iterable[str | Path]) -> pa.Table:
    """What failed in the attempts at rollouts under ``paths``."""
    import orjson
    import pyarrow as pa

    from gymdata.store.journal import read_failures

    texts = {name: pa.string() for name in _FAILURE_TEXT}
    numbers = {"attempt": pa.int64(), "rollout_index": pa.int64(), "counts": pa.bool_(), "duration_s": pa.float64()}
    rows = [dict(record) for path in paths for record in read_failures(path)]
    for row in rows:
        for name, value in row.items():
            if name in texts and value is not None and not isinstance(value, str):
                row[name] = orjson.dumps(value, default=str).decode()
    return pa.Table.from_pylist(rows, pa.schema({**texts, **numbers}))
