"""Which rollouts there are, kept up to date while a run is collected; each is read alone, by its number."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, GymdataError
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS, Table
from gymdata.scores.chosen import default_score, state_of_scores, with_score
from gymdata.store.journal import row_parser, scan
from gymdata.store.partial_reads import RowGroup, row_groups
from gymdata.store.paths import Source
from gymdata.store.tables import read_table, row_batches, scan_batches
from gymdata.view.evidence.lines import Line, lines_of
from gymdata.view.evidence.stages import sources_of

#: Columns of every rollout that stay in memory: all but messages, tokens, tools, the task's row and foreign fields.
SCALARS = [n for n in ROLLOUTS.schema.names if n not in ("messages", "tools", "task", "extra", "turns")]
#: Columns with few distinct values.
_REPEATED = ("run_id", "policy", "policy_hash", "status", "stop_reason", "finish_reason")
_SCHEMA = pa.schema([ROLLOUTS.schema.field(n) for n in SCALARS])
_HELD = pa.schema([f.with_type(pa.dictionary(pa.int32(), pa.string())) if f.name in _REPEATED else f for f in _SCHEMA])
#: Rows of a file without row groups that are put aside together.
_BATCH_ROWS = 1_024
#: What a list shows of the texts is in these columns.
_TEXTS = ["messages", "task"]
_CACHED_ROWS = 128


@dataclass
class _Part:
    """The rows of one file."""

    source: Source
    state: tuple[int, ...]
    table: pa.Table
    groups: list[RowGroup]
    #: In a journal: the offset of the next line, and the end of the last one, with its checksum.
    offset: int = 0
    end: bytes = b""
    #: Its rows' messages and tasks alone, read when a list first shows them.
    texts: list[RowGroup] | None = field(default=None, init=False)
    #: No other part's, as the address of an object would be once the object is gone.
    number: int = field(default_factory=itertools.count().__next__, init=False)
    starts: Any = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.concatenate(([0], np.cumsum([group.rows for group in self.groups]))).astype(np.int64)


@dataclass(frozen=True)
class Snapshot:
    """All rollouts at one moment, in reading order. ``version`` grows when something changed; ``problems``: a line for each
    file whose rows are not here; ``growing``: rows come from a journal; ``paths``: the given ones that hold rollouts;
    ``repeated``: a line for each folder or file whose rollouts are counted with another, too; ``score``: the re-scoring
    that is ``table``'s reward, None for the total reward of ``collect``."""

    table: pa.Table
    parts: tuple[_Part, ...]
    version: int
    problems: tuple[str, ...]
    growing: bool
    paths: tuple[Path, ...] = ()
    repeated: tuple[str, ...] = ()
    score: str | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def find(self, rollout_id: str) -> int | None:
        index = pc.index(self.table["rollout_id"], pa.scalar(rollout_id)).as_py()
        return None if index < 0 else int(index)

    def where(self, column: str, value: str) -> list[int]:
        """The rows with this text in a column, in order."""
        rows: list[int] = np.flatnonzero(pc.equal(self.table[column], value).to_numpy()).tolist()
        return rows

    def scored(self, rows: pa.Table, numbers: Sequence[int]) -> pa.Table:
        """``rows``, which are those of ``numbers``, with this snapshot's reward."""
        rewards = self.table["reward"].take(pa.array(numbers, pa.int64()))
        return rows.set_column(rows.schema.get_field_index("reward"), "reward", rewards)

    def file(self, number: int) -> Path:
        for part in self.parts:
            if number < part.table.num_rows:
                return part.source.path
            number -= part.table.num_rows
        raise IndexError(number)

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Scalar columns with the schema's own types."""
        return self.table.select(list(names)).cast(pa.schema([_SCHEMA.field(n) for n in names]))

    def batches(self, table: Table, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of all rows, in their order."""
        for part in self.parts:
            if part.source.kind == "parquet":
                yield from scan_batches(part.source.path, table, columns)
            else:
                for group in part.groups:
                    yield from group.load().select(list(columns)).to_batches()


class RolloutIndex:
    """The rollouts under several paths. ``snapshot`` is what is there now, or was ``fresh_s`` seconds ago."""

    def __init__(self, paths: Sequence[str | Path], fresh_s: float = 0.5) -> None:
        self._fresh_s = fresh_s
        self.paths = [Path(path) for path in paths]
        self._guard = threading.RLock()
        self._held: dict[Path, _Part] = {}
        self._aside = _Aside()
        self._rows: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._looked = 0.0
        self._last = Snapshot(_HELD.empty_table(), (), 0, (), False)
        #: Of the last look: the problems of files, and the times of scores.
        self._state: tuple[tuple[str, ...], list[dict[str, str]]] = ((), [])

    def close(self) -> None:
        """Remove what was put aside."""
        self._aside.close()

    def snapshot(self) -> Snapshot:
        """The rollouts, looked up again when that was not done just now."""
        with self._guard:
            if time.monotonic() - self._looked >= self._fresh_s:
                self._refresh()
                self._looked = time.monotonic()
            return self._last

    def rows(self, snapshot: Snapshot, numbers: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Whole rows, or some of their columns, in the order of ``numbers``. Raises DataError."""
        by_number: dict[int, pa.Table] = {}
        start = 0
        for part in snapshot.parts:
            part_rows = [n - start for n in numbers if start <= n < start + part.table.num_rows]
            by_number |= {start + k: row for k, row in self._read(part, part_rows, columns)}
            start += part.table.num_rows
        return pa.concat_tables([by_number[n] for n in numbers], promote_options="default")

    def lines(self, snapshot: Snapshot, numbers: Sequence[int], searched: str = "") -> dict[int, Line]:
        """What a list shows of the texts of some rows, by row; each row group is read once. Raises DataError."""
        lines: dict[int, Line] = {}
        start = 0
        for part in snapshot.parts:
            part_rows = np.array([n - start for n in numbers if start <= n < start + part.table.num_rows], np.int64)
            which = np.searchsorted(part.starts, part_rows, side="right") - 1
            if len(part_rows) and part.source.kind == "parquet" and part.texts is None:
                part.texts = row_groups(part.source.path, ROLLOUTS, _TEXTS)
            for group in np.unique(which).tolist():
                inside = part_rows[which == group]
                rows = (part.texts or part.groups)[group].load().select(_TEXTS)
                texts = rows.take(pa.array(inside - part.starts[group]))
                lines |= zip((start + inside).tolist(), lines_of(texts, searched), strict=True)
            start += part.table.num_rows
        return lines

    def row(self, snapshot: Snapshot, number: int) -> RolloutRow:
        """One rollout, all columns; ``reward`` is the snapshot's."""
        rollout: RolloutRow = snapshot.scored(self.rows(snapshot, [number]), [number]).to_pylist()[0]
        return rollout

    def _read(self, part: _Part, rows: Sequence[int], columns: Sequence[str] | None) -> Iterator[tuple[int, pa.Table]]:
        which = np.searchsorted(part.starts, rows, side="right") - 1
        loaded: dict[int, pa.Table] = {}
        for row, group in zip(rows, which.tolist(), strict=True):
            key = (part.number, row)
            with self._guard:
                table = self._rows.get(key)
            if table is None:
                if group not in loaded:
                    loaded = {group: part.groups[group].load()}
                # A copy of its own: a view would keep the whole row group in memory.
                batches = loaded[group].slice(row - int(part.starts[group]), 1).combine_chunks().to_batches()
                table = pa.Table.from_batches([pa.ipc.read_record_batch(b.serialize(), b.schema) for b in batches])
                with self._guard:
                    self._rows[key] = table
                    while len(self._rows) > _CACHED_ROWS:
                        self._rows.popitem(last=False)
            yield row, table if columns is None else table.select(list(columns))

    def _refresh(self) -> None:
        sources, problems, holding = [], [], []
        for path in self.paths:
            try:
                files = sources_of(path, ROLLOUTS)
                sources += files
                holding += [path] if files else []
            except (GymdataError, OSError) as error:
                problems.append(str(error))
        parts = []
        for file, source in {source.path.resolve(): source for source in sources}.items():
            try:
                parts.append(self._part(file, source))
            except FileNotFoundError:
                continue  # a journal that was sealed since: the next snapshot finds its part
            except (GymdataError, OSError) as error:
                problems.append(str(error))
        same = len(parts) == len(self._last.parts) and all(a is b for a, b in zip(parts, self._last.parts, strict=True))
        try:
            written = state_of_scores(holding)
        except (GymdataError, OSError) as error:
            problems.append(str(error))
            written = []
        if same and (tuple(problems), written) == self._state:
            return
        self._state = (tuple(problems), written)
        self._held = {part.source.path.resolve(): part for part in parts}
        tables = [part.table for part in parts if part.table.num_rows]
        table = pa.concat_tables(tables) if tables else _HELD.empty_table()
        growing = any(part.source.kind == "journal" for part in parts)
        version = self._last.version + 1
        repeated = tuple(_repeated(parts))
        score = None
        try:
            score, _ = default_score(holding, None)
            table, _ = with_score(holding, table, score)
        except (GymdataError, OSError) as error:
            problems.append(str(error))
        self._last = Snapshot(table, tuple(parts), version, tuple(problems), growing, tuple(holding), repeated, score)

    def _part(self, file: Path, source: Source) -> _Part:
        stat = file.stat()
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        previous = self._held.get(file)
        if previous is not None and previous.state == state:
            return previous
        if source.kind == "journal":
            return self._grown(file, source, state, previous)
        if source.kind == "parquet":
            groups = row_groups(file, ROLLOUTS)
            return _Part(source, state, _held(read_table(file, ROLLOUTS, SCALARS)), groups)
        batches = list(scan_batches(file, ROLLOUTS, None, _BATCH_ROWS))
        table = _held(pa.Table.from_batches([batch.select(SCALARS) for batch in batches]))
        return _Part(source, state, table, [self._aside.add(batch) for batch in batches])

    def _grown(self, file: Path, source: Source, state: tuple[int, ...], previous: _Part | None) -> _Part:
        """A journal, of which only the lines that were added are read."""
        # A journal of another run may have the name and the inode of an earlier one, and be longer.
        base = previous if previous is not None and _has_at(file, previous.offset, previous.end) else None
        offset, end, groups = (base.offset, base.end, list(base.groups)) if base is not None else (0, b"", [])
        tables = [base.table] if base is not None else []
        parse, rows = row_parser(), []
        for line in scan(file, offset):
            if not line.closed:
                break  # incomplete
            offset, end = line.offset + len(line.raw) + 1, line.raw[-10:] + b"\n"
            if line.body is not None:
                try:
                    rows.append((line.offset, parse(line.body), len(line.body)))
                except orjson.JSONDecodeError as error:
                    where = f"{file}: byte {line.offset:,}"
                    raise DataError(f"{where}: got text that is not JSON, expected a journaled row") from error
        for batch in row_batches(rows, ROLLOUTS, ROLLOUTS.schema.names, str(file)):
            groups.append(self._aside.add(batch))
            tables.append(_held(pa.Table.from_batches([batch.select(SCALARS)])))
        table = pa.concat_tables(tables).combine_chunks() if tables else _HELD.empty_table()
        return _Part(source, state, table, groups, offset, end)


def _has_at(file: Path, offset: int, end: bytes) -> bool:
    """Whether the bytes of the file before ``offset`` end so."""
    with file.open("rb") as opened:
        opened.seek(offset - len(end))
        return opened.read(len(end)) == end


def _repeated(parts: Sequence[_Part]) -> Iterator[str]:
    """A line for each run folder or file with rollouts that a larger one has, too; what is filtered of a run repeats it."""
    by_root: dict[Path, list[_Part]] = {}
    for part in parts:
        file = part.source.path
        by_root.setdefault(file.parent.parent if file.parent.name == "rollouts" else file, []).append(part)
    if len(by_root) < 2:
        return  # one run has each rollout once
    largest = sorted(by_root.items(), key=lambda item: -sum(part.table.num_rows for part in item[1]))
    ids = [chunk for _, parts_of_root in largest for part in parts_of_root for chunk in part.table["rollout_id"].chunks]
    encoded = pa.chunked_array(ids, pa.string()).combine_chunks().dictionary_encode()
    codes, owner = encoded.indices.to_numpy(), np.full(len(encoded.dictionary), -1)
    start = 0
    for number, (root, parts_of_root) in enumerate(largest):
        root_codes = codes[start : start + sum(part.table.num_rows for part in parts_of_root)]
        start += len(root_codes)
        again = owner[root_codes]
        if (twice := again >= 0).any():
            other = largest[int(again[twice][0])][0]
            yield f"{root}: {int(twice.sum()):,} of its {len(root_codes):,} rollouts are in {other}, too"
        owner[root_codes[~twice]] = number


def _held(table: pa.Table) -> pa.Table:
    columns = []
    for schema_field in _HELD:
        column = table[schema_field.name].combine_chunks()
        columns.append(column.dictionary_encode().cast(schema_field.type) if schema_field.name in _REPEATED else column)
    return pa.Table.from_arrays(columns, schema=_HELD)


class _Aside:
    """Batches of files without row groups, in one temporary file that is mapped into memory."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, batch: pa.RecordBatch) -> RowGroup:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="gymdata-view-")
        file = Path(self._folder.name, "rows")
        data = batch.serialize()
        with file.open("ab") as out:
            # After all that is there, also what a full disk took of another batch.
            start = out.tell()
            out.write(data)
        size, schema = data.size, batch.schema

        def load() -> pa.Table:
            with file.open("rb") as opened:
                opened.seek(start)
                return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(opened.read(size)), schema)])

        return RowGroup(batch.num_rows, load)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
