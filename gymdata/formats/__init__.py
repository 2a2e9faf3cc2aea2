"""Formats of other projects, one file each: ``@FORMATS.register("name")`` makes one known to import, export, validate,
query, help and completion. Another package adds one through an entry point of the group ``gymdata.formats``.

Files here are loaded when a file of unknown format is looked at, so they import what loads pyarrow inside their functions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from gymdata.errors import DataError, UsageError, abridged, json_kind, json_value
from gymdata.formats.conversion.importing import NO_JSON, ODD, BadItem, Importing, Origin, documents
from gymdata.formats.conversion.rows import NOT_TRAINED, unread_row, without_reward
from gymdata.formats.text.rows import first_row
from gymdata.formats.text.words import is_trained
from gymdata.rollouts.column_names import renamed
from gymdata.rollouts.failures import failure_of, without_nan
from gymdata.rollouts.messages import JsonObject, TableRow, field_at
from gymdata.store.formats import FORMATS as FORMATS
from gymdata.store.formats import ForeignFormat, first_values, format_of, is_own, of_no_format

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.paths import Source
    from gymdata.store.stage_output import Part

#: The fields of ``--map`` by which a format is told.
_NAMING = {"prompt", "messages", "answer", "chosen", "rejected"}
#: Documents that are looked at for what is wrong with a file.
_LOOKED_AT = 20
#: Write buffer in bytes.
_BUFFER = 1 << 20


class Format(ForeignFormat):
    """A format of rollouts or pairs. One that is imported has ``content``, ``recognise_row`` (or ``recognise``, or
    ``keys`` alone) and ``row``; one that is exported has ``suffixes`` and ``write``."""

    #: The column of a document that is the list of its items; "" where a document is an item itself.
    several: ClassVar[str] = ""
    #: Names of files that an export writes end so.
    suffixes: ClassVar[tuple[str, ...]] = ()
    #: Whether its rows have the log-probabilities of what was sampled.
    holds_logprobs: ClassVar[bool] = False
    #: Whether its rollouts have a reward.
    holds_reward: ClassVar[bool] = False
    #: What of ``KINDS`` its rows have a place for.
    carries: ClassVar[tuple[str, ...]] = ()
    #: Columns that it is written from, None for all of them; and fields in them that are not read.
    columns: ClassVar[Sequence[str] | None] = None
    unread: ClassVar[tuple[str, ...]] = ()
    #: Whether its rows may be a prompt with its completion as plain text, which needs no chat template.
    holds_plain_text: ClassVar[bool] = False
    #: Columns by which its rows are recognised, any of these sets; none where they are recognised in another way.
    keys: ClassVar[Sequence[set[str]]] = ()

    def recognise(self, value: Any) -> bool:
        return self.recognise_row(first_row(value))

    def recognise_row(self, row: JsonObject) -> bool:
        """``recognise`` of a format that its first row tells (``first_row``)."""
        return any(keys <= row.keys() for keys in self.keys)

    def answers(self, row: JsonObject, file: str) -> bool:  # noqa: ARG002 - what an override reads
        """Whether a row has a question and an answer in columns that elsewhere are a task's. Raises DataError for unclear
        columns."""
        return False

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """(source, line, value, text) of each document of files."""
        return ((source, *document) for source in sources for document in documents(source))

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """(place before what is wrong with it, item) of the items of a document, or of each of a list of them, each of which
        becomes a row: those of its column ``several``, else the document itself."""
        for number, document in enumerate(value if isinstance(value, list) else [value]):
            place = f"row {number}: " if isinstance(value, list) else ""
            parts = document.get(self.several) if self.several and isinstance(document, dict) else None
            if isinstance(parts, list) and parts:
                yield from ((place, self.item_of(part, document)) for part in parts)
            else:
                yield place, document

    def item_of(self, part: Any, document: JsonObject) -> Any:  # noqa: ARG002 - only some need the rest
        """The item that an entry of ``several`` is."""
        return part

    def row(self, item: Any, importing: Importing) -> TableRow:
        """The row of the table that an item becomes, as the store turns it into columns. Raises BadItem, or anything of
        ``importing.ODD``."""
        raise NotImplementedError

    def read(self, sources: Iterable[Source], importing: Importing) -> Iterator[tuple[int, TableRow]]:
        """(line, row) of files."""
        for source, line, value, text in self.documents(sources):
            if self.holds_text:
                value = rows_renamed(value, importing.columns)
            for number, (place, item) in enumerate(self._divided(value)):
                importing.origin = (source.path.name, line, number)
                origin = Origin(source.path, line, place)
                try:
                    row = self._checked(item, importing)
                except (BadItem, *ODD) as error:
                    importing.turn_down(error, origin, text)
                else:
                    importing.origins.append(origin)
                    yield line, row

    def _divided(self, value: Any) -> Iterator[tuple[str, Any]]:
        """``items``, and a fault for a document that is none or cannot be divided."""
        try:
            yield from [("", value)] if isinstance(value, BadItem) else self.items(value)
        except ODD as error:
            yield "", BadItem.of(error)

    def _checked(self, item: Any | BadItem, importing: Importing) -> TableRow:
        if isinstance(item, Exception):
            raise item
        if self.holds_text and not isinstance(item, dict):
            raise DataError(f"got {json_value(item)}, expected an object")
        item = without_nan(self.name, item) if isinstance(item, dict) else item
        failure = failure_of(self.name, item)
        try:
            row = self.row(item, importing)
        except (BadItem, *ODD):
            if failure is None or failure.is_rollout:
                raise
            row = unread_row(item, importing)
        row = row if failure is None else without_reward(row, failure)
        if self.holds_text and not is_trained(item):
            if self.table == "pairs":
                raise BadItem("S103", "the row says that it is not trained")
            for message in row["messages"]:
                message["extra"] = NOT_TRAINED if message["role"] == "assistant" else message["extra"]
        return row

    def write(self, row: TableRow, lost: Counter[str]) -> bytes | None:
        """The line of a row (as ``store.columns.to_rows`` gives it), with its newline; None when the format cannot hold it.
        ``lost`` counts rows by what the format has no place for."""
        raise NotImplementedError

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[Any]:
        """What ``save`` takes of each row, which is counted (``Export.carry``)."""
        from gymdata.store.columns import to_rows

        for row in export.rows(batches, to_rows):
            if (line := self.write(row, export.lost)) is not None:
                export.carry(self.carries)
                yield line

    def save(self, converted: Iterable[Any], part: Part, export: Export) -> None:
        """Write what ``convert`` gave to ``part``, and count it in ``export.written``. Raises StoreError.from_os."""
        with part.path.open("wb", buffering=_BUFFER) as file:
            for line in converted:
                file.write(line)
                export.written += 1


def rows_renamed(value: Any, columns: Mapping[str, str]) -> Any:
    """A document, a row or a list of them, with the columns that are named, or known, under their known names."""
    if isinstance(value, list):
        return [renamed(row, columns) if isinstance(row, dict) else row for row in value]
    return renamed(value, columns) if isinstance(value, dict) else value


def format_named(name: str) -> Format:
    """The format of that name. Raises UsageError with the nearest name."""
    return cast(Format, FORMATS[name].object(name))


def imported() -> dict[str, Format]:
    """The formats that can be imported, by name."""
    return {entry.name: format for entry in FORMATS if (format := format_named(entry.name)).content}


def exported() -> dict[str, Format]:
    """The formats that can be exported, by name."""
    return {entry.name: format for entry in FORMATS if (format := format_named(entry.name)).suffixes}


def answered(source: Source, columns: Mapping[str, str]) -> Format | None:
    """The format that reads a file as answers or preferences whose columns are named by ``columns`` (field → column), or
    known: a question and its answer, which elsewhere are tasks. Raises DataError where other columns may be part of them."""
    rows = [rows_renamed(row, columns) for row in _first_rows(source)]
    if any(is_own(row) for row in rows):
        return None
    for name in ("trl-preference", "trl-messages", "trl-prompt-completion"):
        format = format_named(name)
        for row in rows:
            with contextlib.suppress(TypeError, LookupError, AttributeError):
                if format.recognise(row) or format.answers(row, str(source.path)):
                    return format
    return None


def _first_rows(source: Source) -> list[JsonObject]:
    with contextlib.suppress(DataError, OSError, ValueError):  # their reader reports them
        values = [value if isinstance(value, list) else [value] for value in first_values(source)]
        return [row for several in values for row in several if isinstance(row, dict)]
    return []


def format_in(source: Source, columns: Mapping[str, str]) -> Format | None:
    """The format of a file that is imported or trained, with columns as of ``answered``; None for gymdata's own. Raises
    UsageError for a column that none of its first rows has."""
    rows = _first_rows(source) if columns else []
    for field, column in columns.items():
        if rows and not any(column in row or field_at(row, column) is not None for row in rows):
            raise UsageError(
                f"--map {field}={column}: no row at the beginning of {source.path.name} has this column",
                hint=f"the columns are {abridged(rows[0])}",
            )
    format = None if columns.keys() & _NAMING else format_of(source)
    return cast(Format, format) if format is not None else answered(source, columns)


def detect(sources: Sequence[Source], columns: Mapping[str, str]) -> Format:
    """The format that all of ``sources`` are in, with columns as of ``answered``. Raises UsageError or DataError when they
    have no known format, or several."""
    if not sources:
        raise UsageError("no file to import", hint="gymdata import FILE… -o RUN")
    expected = "one that `gymdata docs your-data` lists"
    formats: dict[str, Path] = {}
    for source in sources:
        if source.path.stat().st_size == 0:
            raise DataError.empty(source.path, expected)
        if (format := format_in(source, columns)) is None:
            raise _unknown(source, expected)
        formats.setdefault(format.name, source.path)
    if len(formats) > 1:
        several = abridged(f"{path.name} is {name}" for name, path in formats.items())
        raise UsageError(f"files of several formats: {several}", hint="import them one format at a time")
    return format_named(next(iter(formats)))


def _unknown(source: Source, expected: str) -> DataError:
    """The error of a file that is in none of the formats."""
    values = [value for _, value, _ in islice(documents(source), _LOOKED_AT)]
    if not values:
        return DataError.empty(source.path, expected)
    if all(isinstance(value, BadItem) for value in values):
        return DataError.unreadable(source.path, str(values[0]).removeprefix(NO_JSON), "rows are objects of JSON")
    value = next(value for value in values if not isinstance(value, BadItem))
    row = value[0] if isinstance(value, list) and value else value
    if not isinstance(row, Mapping):
        hint = f"its first value is {json_kind(row)}; rows are JSON objects with a prompt and an answer"
    elif is_own(row):
        hint = "files of gymdata need no import"
    else:
        return of_no_format(source, row, expected, "give --map prompt=COLUMN --map answer=COLUMN")
    return DataError(f"{source.path}: contains rows of no known format, expected {expected}", hint=hint)
