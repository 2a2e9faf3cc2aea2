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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError, GymdataError, abridged, counted
from gymdata.rollouts.schema import ROLLOUTS, TABLES, check_version
from gymdata.store.fetch import fetched
from gymdata.store.formats import first_values, format_of
from gymdata.store.journal import FAILURES
from gymdata.store.lines import row_lines
from gymdata.store.paths import RUN_JSON, Source, matches, read_facts, resolve
from gymdata.store.reading import check_source, same_content, warn

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
_KEYS = "rollout_id, run_id, task_id, group_id, rollout_index"
_FAILURE_TEXT = ("kind", "place", "message", "rollout_id", "run_id", "group_id", "task_id", "at", "turns", "messages")


@dataclass
class Files:
    """Which files hold which table, and the folders whose failures.jsonl belongs to them."""

    by_table: dict[str, list[Source]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)


def find_files(paths: Sequence[str | Path]) -> Files:
    """The tables under path arguments: run folders (with their stages), stage folders, files and globs of these.

    A file that is given twice, or by two ways, is one file: its rows count once. Raises DataError for a path that
    is not there or holds no table of gymdata.
    """
    files = Files()
    for path in paths:
        for match in matches(fetched(path)):
            if not match.is_dir():
                (source,) = resolve(match, ROLLOUTS)
                files.by_table.setdefault(_table_of(source), []).append(source)
                continue
            for name in TABLES:
                if inside := resolve(match, name):
                    files.by_table.setdefault(name, []).extend(inside)
            files.folders.append(match)
    for table, sources in files.by_table.items():
        files.by_table[table] = list({source.path.resolve(): source for source in sources}.values())
        for source in files.by_table[table]:
            check_source(source.path)
    files.folders = list({folder.resolve(): folder for folder in files.folders}.values())
    for folder in files.folders:
        run_json = folder / RUN_JSON
        # A run may be without rows yet.
        if (folder / ROLLOUTS.name).is_dir() or (run_json.is_file() and read_facts(run_json).get("attempts")):
            files.by_table.setdefault(ROLLOUTS.name, [])
    if not files.by_table and not any((f / FAILURES).is_file() for f in files.folders):
        raise DataError.empty(paths[0], "rows of a gymdata table")
    return files


def _table_of(source: Source) -> str:
    """The table that a file declares to hold, or that its columns imply."""
    if source.kind == "segment":
        return ROLLOUTS.name
    where = str(source.path)
    foreign = format_of(source)
    if foreign is not None and not foreign.read_in_place:
        raise foreign.refused(source, "one of gymdata's tables")
    if foreign is not None:
        return ROLLOUTS.name
    if source.kind == "parquet":
        from gymdata.store.parquet import schema_of

        schema = schema_of(source.path)
        columns = schema.names
        if (name := check_version(schema.metadata, where)) is not None:
            if name not in TABLES:
                raise DataError(f"{where}: says that it holds {name!r}, which is no table of gymdata")
            return name
        needed = {table.name: table.required() for table in TABLES.values()}
    else:
        if next(row_lines(source), None) is None:
            raise DataError.empty(source.path, "rows of a gymdata table")
        columns = next((list(row) for row in first_values(source) if isinstance(row, dict)), [])
        needed = {
            table.name: [n for n in table.required() if not table.schema.field(n).nullable] for table in TABLES.values()
        }
    # The table all of whose columns are present; of several, the one with most columns. One column is not enough.
    candidates = [name for name, required in needed.items() if set(required) <= set(columns)]
    if candidates:
        return max(candidates, key=lambda name: len(needed[name]))
    raise DataError(f"{where}: holds none of gymdata's tables (it has {abridged(columns[:8]) or 'nothing'})")


class Views:
    """A DuckDB connection over files. Use as a context manager: leaving it removes what was registered.

    ``database``: the file that ``store`` makes, with views that any DuckDB client reads."""

    def __init__(self, files: Files, database: Path | None = None) -> None:
        self.files = files
        self._database = database
        always = _ALWAYS if "rollouts" in files.by_table else ("failures",) if files.folders else ()
        self.names: tuple[str, ...] = tuple(dict.fromkeys((*always, *files.by_table)))
        self._fault: DataError | None = None
        self._scanned: list[Any] = []
        self._made: set[str] = set()
        self._udf = False
        self._con: duckdb.DuckDBPyConnection | None = None

    def __enter__(self) -> Views:
        import duckdb

        # For this alone: DuckDB lets SQL read all that is in it.
        self._spill = tempfile.TemporaryDirectory(prefix="gymdata-query-")
        off = ("python_enable_replacements", "autoload_known_extensions", "autoinstall_known_extensions")
        try:
            self._con = duckdb.connect(self._database or ":memory:")
            for setting in (f"temp_directory={_text(self._spill.name)}", *(f"{name}=false" for name in off)):
                self._con.execute(f"SET {setting}")
        except BaseException:  # Ctrl-C, too
            self._spill.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import duckdb

        if self._con is not None:
            # Left registered, the function makes DuckDB's bindings complain on stderr when the process ends.
            if self._udf:
                with contextlib.suppress(duckdb.Error):  # what ended the block is reported, not that a result is open
                    self._con.remove_function(_UDF)
            self._con.close()
            self._spill.cleanup()

    @property
    def con(self) -> duckdb.DuckDBPyConnection:
        if self._con is None:
            raise RuntimeError("Views is used outside its with-block")
        return self._con

    def prepare(self, sql: str) -> None:
        """Make the views that ``sql`` names (all, when it names none), then lock everything else out.

        What costs to find out, reward names and prompts, is looked at only when the text can need it.
        """
        text = sql.lower()
        named = [name for name in self.names if re.search(rf"\b{name}\b", text)]
        everything = bool(re.search(r"\*(?!\s*\))|columns|describe|summarize|\bshow\b", text)) or _selects_all(text)
        rewards, prompts = (everything or word in text for word in ("reward_", "prompt_token_ids"))
        self._make(named or self.names, rewards=rewards, prompts=prompts)
        self._warn_of_copies(named or self.names)
        self.con.execute(_FIND_IDS)
        lock(self.con)

    def store(self) -> None:
        """Write all views to the database. Parquet stays where it is, what is in other files is copied."""
        self._make(self.names, rewards=True, prompts=True)
        self.con.execute(_FIND_IDS)

    def _make(self, names: Iterable[str], *, rewards: bool, prompts: bool) -> None:
        for name in names:
            if name == "failures":
                self._add("failures", failures(self.files.folders))
            elif name in ("turns", "messages"):
                self._base("rollouts", rewards)
                packed = ", ".join(f"{_text(field)}: x.{field}" for field in _UDF_FIELDS)
                rebuilt = f"{_UDF}(list_transform(turns, lambda x: {{{packed}}}), rollout_id)"
                if self._database is not None:
                    rebuilt = _PROMPTS
                elif name == "turns" and prompts:
                    self._register_prompts()
                rebuilt, shown = (f", unnest({rebuilt}) AS p", ", p AS prompt_token_ids") if prompts else ("", "")
                turns_view = f"""SELECT {_KEYS}, turn, t.*{shown} FROM (
  SELECT {_KEYS}, unnest(range(len(turns)))::INTEGER AS turn, unnest(turns) AS t{rebuilt} FROM rollouts)"""
                view = self._without_nan(turns_view) if name == "turns" else _MESSAGES_VIEW
                self.con.execute(f"CREATE VIEW {name} AS {view}")
            else:
                self._base(name, rewards)

    def _base(self, name: str, rewards: bool) -> None:
        if name in self._made:
            return
        self._made.add(name)
        from gymdata.store.partial_reads import verified_datasets
        from gymdata.store.tables import read_source

        sources, table = self.files.by_table[name], TABLES[name]
        # DuckDB's own reader ignores checksums and trusts a file's statistics.
        files = [s.path.resolve() for s in sources if s.kind == "parquet"]
        scanned = verified_datasets(files, table)
        self._scanned += scanned
        parts, loaded = [], list[Any]()
        if self._database is None:
            loaded += scanned
        elif files:
            names_of_files = ", ".join(_text(escape(str(file))) for file in files)
            parts.append(f"SELECT * FROM read_parquet([{names_of_files}], union_by_name = true)")
        loaded += [read_source(source, table, None) for source in sources if source.kind != "parquet"]
        for number, data in enumerate(loaded or ([] if parts else [table.arrow.empty_table()])):
            self._add(f"gymdata_{name}_{number}", data)
            parts.append(f"SELECT * FROM gymdata_{name}_{number}")
        body = self._without_nan(" UNION ALL BY NAME ".join(parts))
        if name == "rollouts" and rewards:
            distinct = f"SELECT DISTINCT unnest(rewards).name AS n FROM ({body}) ORDER BY n"
            names = [name for (name,) in self.con.execute(distinct).fetchall() if name is not None]
            # SQL ignores case: names that differ only in case are numbered.
            counts, ordinal, extra = Counter(map(str.lower, names)), Counter[str](), ""
            for reward in names:
                ordinal[reward.lower()] += 1
                shown = reward if counts[reward.lower()] == 1 else f"{reward}_{ordinal[reward.lower()]}"
                of_name = f"list_filter(rewards, lambda r: r.name = {_text(reward)})[1].value"
                extra += f", {of_name} AS {_quoted(f'reward_{shown}')}"
            body = f"SELECT *{extra} FROM ({body})"
        self.con.execute(f"CREATE VIEW {name} AS {body}")

    def _add(self, name: str, data: Any) -> None:
        """``data`` as a table: read where it is, or copied into the database."""
        if self._database is None:
            self.con.register(name, data)
            return
        self.con.register("gymdata_data", data)
        self.con.execute(f"CREATE TABLE {name} AS FROM gymdata_data")
        self.con.unregister("gymdata_data")

    def _without_nan(self, body: str) -> str:
        """``body`` with NULL for NaN, which DuckDB sorts above all numbers and which makes every mean NaN."""
        rows = self.con.sql(body)
        values = zip(rows.columns, map(known, map(_quoted, rows.columns), rows.types), strict=True)
        replaced = [f"{sql} AS {_quoted(name)}" for name, sql in values if sql != _quoted(name) and name != "turns"]
        return f"SELECT * REPLACE ({', '.join(replaced)}) FROM ({body})" if replaced else body

    @property
    def fault(self) -> GymdataError | None:
        """A gymdata error that was raised inside DuckDB, which keeps only its text."""
        return self._fault or next((data.fault for data in self._scanned if data.fault is not None), None)

    def _warn_of_copies(self, names: Iterable[str]) -> None:
        """Rows that several paths give are counted as often."""
        from gymdata.store.tables import has_rows

        tables = {"rollouts" if name in ("turns", "messages") else name for name in names}
        for name in tables & set(self.files.by_table):
            files = self.files.by_table[name]
            for path, copy in same_content(s.path for s in files if len(files) > 1 and has_rows(s, TABLES[name])):
                warn(f"{copy} holds the same bytes as {path}: their {name} are counted twice")
        for path, copy in same_content(f / FAILURES for f in self.files.folders if "failures" in tables):
            warn(f"{copy} holds the same bytes as {path}: their failures are counted twice")
        if "rollouts" in tables and len({s.path.parent for s in self.files.by_table["rollouts"]}) > 1:
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
        self._udf = True


def _selects_all(text: str) -> bool:
    """Whether all columns are meant without a star: ``FROM rollouts``, ``TABLE rollouts``, also inside of a statement."""
    return re.search(r"(?:^|[(;]|\b(?:all|union|except|intersect|name))\s*(?:from|table)\b", text) is not None


def lock(con: duckdb.DuckDBPyConnection) -> None:
    """From now on SQL on ``con`` can only read what is registered, no file (but DuckDB's own for what does not fit in
    memory) and no network, and cannot change settings."""
    con.execute("SET enable_external_access=false")
    con.execute("SET lock_configuration=true")


def error_message(error: duckdb.Error) -> str:
    """What DuckDB says, without the line of the statement."""
    return " ".join(str(error).partition("\n\nLINE")[0].split())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def known(sql: str, kind: Any) -> str:
    """``sql``, a value of the DuckDB type ``kind``, with NULL for each NaN in it."""
    if kind.id in ("float", "double"):
        # Not isnan: there DuckDB's reader of Parquet believes a file's statistics, which know nothing of NaN.
        return f"CASE WHEN isfinite({sql}) OR isinf({sql}) THEN {sql} END"
    if kind.id == "list" and (inner := known("x", kind.child)) != "x":
        return f"list_transform({sql}, lambda x: {inner})"
    if kind.id == "struct":
        fields = [(name, f"{sql}.{_quoted(name)}", child) for name, child in kind.children]
        packed = [f"{_text(name)}: {known(field, child)}" for name, field, child in fields]
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

_MESSAGES_VIEW = f"""SELECT {_KEYS}, position, m.* FROM (
  SELECT {_KEYS}, unnest(range(len(messages)))::INTEGER AS position, unnest(messages) AS m FROM rollouts)"""


def failures(paths: Iterable[str | Path]) -> pa.Table:
    """What failed in the attempts at rollouts under ``paths``."""
    import orjson
    import pyarrow as pa

    from gymdata.store.journal import read_failures

    rows = [record for path in paths for record in read_failures(path)]
    columns: dict[str, pa.Array] = {}
    for name in _FAILURE_TEXT:
        values = (row.get(name) for row in rows)
        texts = [v if v is None or isinstance(v, str) else orjson.dumps(v, default=str).decode() for v in values]
        columns[name] = pa.array(texts, pa.string())
    for name, kind in (("attempt", pa.int64()), ("rollout_index", pa.int64()), ("counts", pa.bool_())):
        columns[name] = pa.array([row.get(name) for row in rows], kind)
    columns["duration_s"] = pa.array([row.get("duration_s") for row in rows], pa.float64())
    return pa.table(columns)
