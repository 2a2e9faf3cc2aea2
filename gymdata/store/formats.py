"""Which format of another project a file is in. Every command that reads JSON lines asks here.

Formats are files of ``gymdata/formats/`` and entry points of the group ``gymdata.formats``.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from gymdata.errors import DataError, abridged
from gymdata.registry import Registry
from gymdata.rollouts.messages import RolloutRow
from gymdata.store.lines import decode, fault_of_text, row_lines, values_of
from gymdata.store.paths import Source, matches, resolve

#: Rows that are looked at.
_LOOKED_AT = 20
#: Columns of gymdata's own tables.
_OWN = frozenset({"rollout_id", "comparison_id", "policy_hash", "rollout_index"})
_OURS = _OWN | {"run_id", "group_id", "n_turns"}
#: The column that names a row of a table.
_TABLE_OF_ID = {"pair_id": "pairs", "comparison_id": "comparisons", "rollout_id": "rollouts"}
#: Keys that no task has.
_ANSWERED = {"turns", "response", "chosen", "completion", "completions"}
#: Columns of published text data, of which ``collect`` makes tasks.
_TEXTS = {"prompt", "conversations", "instruction", "question", "problem", "query", "turns"}
#: Parts of the names of columns that hold answers, or what no policy here sees or hears.
_NO_TASKS = ("response", "completion", "chosen", "reject", "output", "answers", "image", "audio", "video")
#: Faulty lines that are named each.
_FEW = 3


def is_own(names: Collection[str]) -> bool:
    """Whether columns are those of a table of gymdata's; others have a ``pair_id``, too."""
    return not _OWN.isdisjoint(names) or {"pair_id", "run_id"}.issubset(names)


class ForeignFormat:
    """What reading needs to know of a format; formats are subclasses of ``gymdata.formats.Format``."""

    #: What a file of this format holds, for messages: "ATIF trajectories". Empty: it is never imported.
    content: ClassVar[str] = ""
    #: The table that its rows are of: "rollouts" or "pairs", or, of one that is exported, "experiences".
    table: ClassVar[str] = "rollouts"
    #: Whether it is answers or preferences as text, without token ids.
    holds_text: ClassVar[bool] = False
    #: Whether its rows have the token ids: those formats are asked first.
    holds_ids: ClassVar[bool] = False
    #: Whether commands read its rollouts without an import.
    read_in_place: ClassVar[bool] = False
    #: Whether rows of other formats have its columns as well: those are asked before.
    general: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def recognise(self, value: Any) -> bool:
        """Whether a JSON value, a row or a whole file, is in this format."""
        raise NotImplementedError

    def refused(self, source: Source, expected: str) -> DataError:
        """The error of a command that reads ``expected`` from a file of this format."""
        scored = "train-sft and train-kto take it as it is, and train-dpo where it has rewards"
        is_text = self.holds_text and not self.holds_ids
        trains = f"; {scored if self.table == 'rollouts' else 'train-dpo takes it as it is'}" * is_text
        hint = f"`gymdata import {shlex.quote(str(source.path))} -o RUN` reads it{trains}"
        content = self.content + " as text" * is_text
        return DataError(f"{source.path}: contains {content}, expected {expected}", hint=hint)

    def rollouts(self, source: Source) -> Iterator[RolloutRow]:
        """The rollouts rows of a file that is read in place (arrays are numpy, times are text)."""
        raise NotImplementedError


FORMATS = Registry[type[ForeignFormat]]("format", "gymdata.formats", "gymdata.formats")


def head(source: Source) -> list[bytes]:
    """The first rows of a file of JSON, each as a line."""
    return [line for _, line in islice(row_lines(source), _LOOKED_AT)]


def format_of(source: Source) -> ForeignFormat | None:
    """The format of a file, by its first rows or the one value that it is; None for gymdata's own, for one that is not
    known, and for a file that cannot be read."""
    if source.kind == "segment":
        return None
    try:
        for value in first_values(source):
            for form in _known():
                with contextlib.suppress(TypeError, LookupError, AttributeError):  # of another type than its format has
                    if form.recognise(value):
                        return form
            if isinstance(value, dict) and is_own(value):
                return None
    except (DataError, OSError, ValueError):  # Arrow's errors of a Parquet file are ValueErrors
        # The reader reports what is wrong with the file.
        return None
    return None


def _known() -> Iterator[ForeignFormat]:
    """The formats that are read, those with token ids first; NeMo Gym's rows are told before other formats are loaded."""
    yield FORMATS.alone("nemo-gym").object("nemo-gym")
    known = [entry.object(entry.name) for entry in FORMATS if entry.object.content]
    yield from sorted(known, key=lambda form: (not form.holds_ids, form.general))


def refuse_foreign(path: Path, expected: str) -> None:
    """Raises DataError for a file in another project's format, of a command that reads ``expected``."""
    try:
        (source,) = resolve(path)
    except DataError:  # a kind of file that only tasks have
        return
    if (foreign := format_of(source)) is not None:
        raise foreign.refused(source, expected)


class Held(NamedTuple):
    """The table that the rows of a file are of, and the format of those that are read in place."""

    table: str
    foreign: ForeignFormat | None = None


def table_of(source: Source, expected: str) -> Held:
    """Which table a file holds: the one that its metadata names, or whose columns its first rows have. What is wrong with
    rows, or with a Parquet file that cannot be read, is for its reader to say.

    ``expected``: what the command reads. Raises DataError for tasks, for rows of another project that are imported first,
    for rows of no known format, and for lines of which none is JSON."""
    if source.kind == "segment":
        return Held("rollouts")
    if (foreign := format_of(source)) is not None:
        if not foreign.read_in_place:
            raise foreign.refused(source, expected)
        return Held(foreign.table, foreign)
    if source.kind == "parquet":
        from gymdata.rollouts.schema import SCHEMA_KEY, TABLES
        from gymdata.store.parquet import schema_of

        try:
            schema = schema_of(source.path)
        except DataError:
            return Held("rollouts")
        if name := (schema.metadata or {}).get(SCHEMA_KEY, b"").decode():
            if name not in TABLES:
                raise DataError(f"{source.path}: says that it holds {name!r}, which is no table of gymdata")
            return Held(name)
        rows: list[Any] = [dict.fromkeys(schema.names)]
    else:
        rows = _first_rows(source)
    objects = [row for row in rows if isinstance(row, dict) and row]
    if (table := table_with(set[str]().union(*objects))) is not None:
        return Held(table)
    if objects and all(map(is_task, objects)):
        raise DataError.other_table(source.path, "tasks", expected)
    if not objects or len(objects) < len(rows) or any(row.keys() & _OURS for row in objects):
        return Held("rollouts")  # whose reader names each fault
    raise of_no_format(source, objects[0], expected, "`gymdata docs your-data` lists the formats that are read")


def of_no_format(source: Source, row: Mapping[Any, Any], expected: str, advice: str) -> DataError:
    """The error of a file whose first ``row`` is of no known format. ``advice``: what to do about it."""
    hint = f"its first row has the keys {abridged(row, 60)}; {advice}{_instead(row, source.path)}"
    return DataError(f"{source.path}: contains rows of no known format, expected {expected}", hint=hint)


def _first_rows(source: Source) -> list[Any]:
    """The first rows of a file of JSON; of one that is none, its error. Raises DataError where nothing of it is JSON."""
    rows = list[Any]()
    for line in head(source):
        try:
            rows.append(decode(line))
        except ValueError as error:
            rows.append(error)
    if len(rows) > _FEW and not any(isinstance(row, (dict, list)) for row in rows):
        raise DataError.unreadable(
            source.path, fault_of_text(source), "is it a whole file of JSON lines, or one value?"
        )
    return rows


def table_with(columns: Collection[str]) -> str | None:
    """The table that rows with these columns are of: the one with most of them, of which they have the half or more, else
    the one whose id they have."""
    from gymdata.rollouts.schema import TABLES

    required = {t.name: {n for n in t.required() if not t.schema.field(n).nullable} for t in TABLES.values()}
    shared = {name: len(names & set(columns)) for name, names in required.items()}
    fitting = [name for name, n in shared.items() if 2 * n >= len(required[name])]
    by_id = next((table for name, table in _TABLE_OF_ID.items() if name in columns and is_own(columns)), None)
    return max(fitting, key=shared.__getitem__, default=by_id)


def tables_in(path: str | Path) -> dict[str, list[Source]]:
    """Table → the files that hold it under a path argument: those of a run folder and its stages, of a stage folder, or of a
    file or a glob of files. Raises DataError as ``resolve`` and ``table_of``."""
    from gymdata.rollouts.schema import TABLES

    tables: dict[str, list[Source]] = {}
    for match in matches(path):
        if match.is_dir():
            inside = [(name, source) for name in TABLES for source in resolve(match, name)]
        else:
            inside = [(table_of(source, "one of gymdata's tables").table, source) for source in resolve(match)]
        for name, source in inside:
            tables.setdefault(name, []).append(source)
    return tables


def is_task(row: Mapping[str, Any]) -> bool:
    """Whether a row is a prompt without an answer."""
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return True  # questions of MT-Bench
    if row.keys() & (_ANSWERED | _TABLE_OF_ID.keys()):
        return False
    return any(row.get(name) not in (None, []) for name in ("messages", "prompt", "responses_create_params"))


def _instead(row: Mapping[Any, Any], path: Path) -> str:
    """What ends the hint about a row of no known format: that ``collect`` reads it, or what it lacks; empty where neither is
    sure."""
    of_gym = "responses_create_params" in row
    if not of_gym and any(word in str(name) for name in row for word in _NO_TASKS):
        return ""
    messages = row["messages"] if isinstance(row.get("messages"), list) else []
    is_asked = any(isinstance(message, dict) and message.get("role") == "user" for message in messages)
    prompts = [
        isinstance(value, str) or (isinstance(value, list) and value != [] and isinstance(value[0], (str, dict)))
        for name, value in row.items()
        if name in _TEXTS
    ]
    if of_gym or is_asked or any(prompts):
        samples = f"; prompts alone are tasks: `gymdata collect {path} -m MODEL -o RUN` samples answers"
        return samples + ("; `import` and train-sft read `answer`, too" if isinstance(row.get("answer"), str) else "")
    if "text" in row and row.keys().isdisjoint(_TEXTS):
        return "; text alone has no prompt and no answer to train"
    return ""


def first_values(source: Source) -> Iterator[Any]:
    """The first values of a file, but none of a Parquet file of gymdata's own."""
    if source.kind == "parquet":
        from gymdata.store.parquet import schema_of

        if is_own(schema_of(source.path).names):
            return
    for _, value, _ in islice(values_of(source), _LOOKED_AT):
        if not isinstance(value, ValueError):
            # After a list the first of its rows.
            yield from (value, *(value[:_LOOKED_AT] if isinstance(value, list) else ()))
