"""The tables under some paths: rollouts, and what was made of them. Key columns are in memory; whole rows are on disk, or,
of JSON lines, in memory, too. A file is read again only when it has changed; of an open segment, what was added."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.query.views import find_files
from gymdata.commands.report.rollouts import codes_of
from gymdata.errors import GymdataError
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.scores.chosen import default_score, state_of_scores, with_score
from gymdata.store.journal import scan
from gymdata.store.lines import decode
from gymdata.store.partial_reads import rows_at
from gymdata.store.paths import RunFacts, Source, find_run_json, is_open, read_facts, resolve
from gymdata.store.tables import read_table, row_parts, scan_batches, sound_batches

#: The columns by which rows of a table are found and listed; of rollouts all but those that may be long.
KEYS = {
    "rollouts": [n for n in ROLLOUTS.schema.names if n not in ("messages", "tools", "task", "extra", "turns")],
    "pairs": ["pair_id", "run_id", "task_id", "chosen_rollout_id", "rejected_rollout_id", "margin", "weight", "source",
              "score"],
    "comparisons": ["comparison_id", "group_id", "task_id", "rollout_i", "rollout_j", "judge_idx", "score_1", "score_2",
                    "ranking", "status", "judge"],
    "experiences": ["rollout_id", "group_id", "sequence_index", "reward", "weight"],
    "audit": ["rollout_id"],
    "scores": ["rollout_id", "name", "value", "status"],
}  # fmt: skip
#: Columns of rollouts with few distinct values.
_REPEATED = ("run_id", "policy", "policy_hash", "status", "stop_reason", "finish_reason")


def sources_of(path: Path, table: Table) -> list[Source]:
    """The files of ``table`` under a path argument; none where a path holds another table."""
    if path.is_dir():
        return resolve(path, table)
    return find_files([path]).by_table.get(table.name, [])


def facts_of(path: Path) -> RunFacts:
    """The run.json that describes a path; empty if it is missing or cannot be read."""
    try:
        run_json = find_run_json(path)
        return read_facts(run_json) if run_json is not None else {}
    except (GymdataError, OSError):
        return {}


@dataclass(frozen=True, eq=False)
class File:
    """The rows of one file. ``keys``: their key columns; ``held``: they themselves, of a file of JSON lines."""

    source: Source
    table: Table
    state: tuple[int, ...]
    keys: pa.Table
    held: pa.Table | None = None
    #: In an open segment: the offset of the next line, and the end of the last one, with its checksum.
    offset: int = 0
    end: bytes = b""

    def read(self, numbers: Any, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Some rows (rising), whole or some of their columns; each row group is read once."""
        if self.held is not None:
            rows = self.held if columns is None else self.held.select(list(columns))
            yield from (rows.slice(number, 1) for number in numbers.tolist())
            return
        yield from rows_at(self.source.path, self.table, numbers, columns)


@lru_cache(maxsize=8)
def whole_row(file: File, number: int) -> pa.Table:
    """A row, which its page, its tokens and each click on one of them ask for."""
    return next(file.read(np.array([number])))


@dataclass(frozen=True, eq=False)
class Rows:
    """A table of several files. ``table``: the key columns of all rows, in reading order."""

    table: pa.Table
    files: tuple[File, ...] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def starts(self) -> Any:
        """The first row of each file, and the number of rows."""
        return np.cumsum([0, *(file.keys.num_rows for file in self.files)])

    def where(self, column: str, value: str) -> list[int]:
        """The rows with this text in a key column."""
        rows: list[int] = np.flatnonzero(pc.equal(self.table[column], value).to_numpy()).tolist()
        return rows

    def file_number(self, number: int) -> int:
        return int(np.searchsorted(self.starts, number, side="right")) - 1

    def file(self, number: int) -> Path:
        return self.files[self.file_number(number)].source.path

    def span(self, file: int) -> range:
        """The rows of a file."""
        return range(*self.starts[file : file + 2].tolist())

    def read(self, numbers: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Whole rows, or some of their columns, in the order of ``numbers``. Raises DataError."""
        order = np.argsort(numbers, kind="stable")
        rising = np.asarray(numbers, np.int64)[order]
        of_file, parts = np.searchsorted(self.starts, rising, side="right") - 1, []
        for number in np.unique(of_file).tolist():
            parts += self.files[number].read(rising[of_file == number] - self.starts[number], columns)
        return pa.concat_tables(parts, promote_options="default").take(pa.array(np.argsort(order)))


@dataclass(frozen=True, eq=False)
class Snapshot(Rows):
    """All rollouts at one moment. ``version`` grows when something changed; ``problems``: a line for each file whose rows
    are not here; ``growing``: a segment is open; ``paths``: the given ones that hold rollouts; ``repeated``: a line
    for each folder or file whose rollouts are counted with another, too; ``score``: the re-scoring that is ``table``'s
    reward, None for the total reward of ``collect``."""

    version: int = 0
    problems: tuple[str, ...] = ()
    growing: bool = False
    paths: tuple[Path, ...] = ()
    repeated: tuple[str, ...] = ()
    score: str | None = None

    def find(self, rollout_id: str) -> int | None:
        index = pc.index(self.table["rollout_id"], pa.scalar(rollout_id)).as_py()
        return None if index < 0 else int(index)

    def reward(self, number: int) -> float | None:
        value: float | None = self.table["reward"][number].as_py()
        return value

    def row(self, number: int) -> RolloutRow:
        """One rollout, all columns; ``reward`` is that of ``table``."""
        row: RolloutRow = self.whole(number).to_pylist()[0] | {"reward": self.reward(number)}
        return row

    def whole(self, number: int) -> pa.Table:
        """One rollout as its file has it."""
        file = self.file_number(number)
        return whole_row(self.files[file], number - int(self.starts[file]))

    def batches(self, table: Table, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of all rollouts, in their order; ``reward`` is that of ``table``."""
        names, first = list(columns), 0
        if set(names) <= set(KEYS[ROLLOUTS.name]):
            schema = pa.schema([ROLLOUTS.schema.field(name) for name in names])
            yield from self.table.select(names).cast(schema).to_batches()
            return
        for file in self.files:
            path, held = file.source.path, file.held
            for batch in scan_batches(path, table, names) if held is None else held.select(names).to_batches():
                rewards = self.table["reward"].slice(first, batch.num_rows).combine_chunks()
                first += batch.num_rows
                yield batch.set_column(names.index("reward"), "reward", rewards) if "reward" in names else batch


class Tables:
    """The tables under several paths. ``snapshot`` is what is there now, or was ``fresh_s`` seconds ago."""

    def __init__(self, paths: Sequence[str | Path], fresh_s: float = 0.5) -> None:
        self.paths = [Path(path) for path in paths]
        self._fresh_s, self._looked = fresh_s, 0.0
        self._guard = threading.RLock()
        self._files: dict[str, dict[Path, File]] = {}
        self._rows: dict[str, Rows] = {}
        self._last = Snapshot(_joined(ROLLOUTS, ()))
        #: Of the last look: the problems of files, and the times of scores.
        self._state: tuple[list[str], list[dict[str, str]]] = ([], [])

    def has(self, name: str) -> bool:
        """Whether there is a table of that name; also True when that cannot be determined, so that its page shows the
        error."""
        try:
            return any(sources_of(path, TABLES[name]) for path in self.paths)
        except (GymdataError, OSError):
            return True

    def rows(self, name: str) -> Rows:
        """The table ``name``, empty if missing. Raises DataError for a damaged or changed file."""
        table = TABLES[name]
        sources = [source for path in self.paths for source in sources_of(path, table)]
        with self._guard:
            files, rows = self._read(table, sources), self._rows.get(name)
            if rows is None or rows.files != files:
                rows = self._rows[name] = Rows(_joined(table, files), files)
            return rows

    def snapshot(self) -> Snapshot:
        """The rollouts, looked up again when that was not done just now."""
        with self._guard:
            if time.monotonic() - self._looked >= self._fresh_s:
                self._refresh()
                self._looked = time.monotonic()
            return self._last

    def _refresh(self) -> None:
        sources, problems, holding = list[Source](), list[str](), list[Path]()
        for path in self.paths:
            try:
                files_of_path = sources_of(path, ROLLOUTS)
                sources += files_of_path
                holding += [path] if files_of_path else []
            except (GymdataError, OSError) as error:
                problems.append(str(error))
        files = self._read(ROLLOUTS, sources, problems)
        written = list[dict[str, str]]()
        try:
            written = state_of_scores(holding)
        except (GymdataError, OSError) as error:
            problems.append(str(error))
        growing = any(_is_open(file.source) for file in files)
        if (files, growing) == (self._last.files, self._last.growing) and (problems, written) == self._state:
            return
        self._state = (list(problems), written)
        table, score = _joined(ROLLOUTS, files), None
        try:
            score, _ = default_score(holding, None)
            table, _ = with_score(holding, table, score)
        except (GymdataError, OSError) as error:
            problems.append(str(error))
        version, repeated = self._last.version + 1, tuple(_repeated(files))
        self._last = Snapshot(table, files, version, tuple(problems), growing, tuple(holding), repeated, score)

    def _read(self, table: Table, sources: Iterable[Source], problems: list[str] | None = None) -> tuple[File, ...]:
        """The files, read where they have changed. One that cannot be read is among the ``problems``, or raises."""
        held, files = self._files.get(table.name, {}), dict[Path, File]()
        for path, source in {source.path.resolve(): source for source in sources}.items():
            try:
                files[path] = self._file(table, source, held.get(path))
            except FileNotFoundError:
                continue  # a segment that was sealed since: the next look finds its part
            except (GymdataError, OSError) as error:
                if problems is None:
                    raise
                problems.append(str(error))
        self._files[table.name] = files
        return tuple(files.values())

    def _file(self, table: Table, source: Source, previous: File | None) -> File:
        stat = source.path.stat()
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if previous is not None and previous.state == state:
            return previous
        if _is_open(source):
            return self._grown(table, source, state, previous)
        if source.kind == "parquet":
            return File(source, table, state, _coded(read_table(source.path, table, KEYS[table.name]), table))
        rows = pa.Table.from_batches(scan_batches(source.path, table, table.schema.names))
        return File(source, table, state, _coded(rows.select(KEYS[table.name]), table), rows)

    def _grown(self, table: Table, source: Source, state: tuple[int, ...], previous: File | None) -> File:
        """An open segment, of which only the lines that were added are read."""
        file, held, offset, end = source.path, [table.schema.empty_table()], 0, b""
        # That of another run may have the name and the inode of an earlier one, and be longer.
        if previous is not None and _has_at(file, previous.offset, previous.end):
            held, offset, end = [previous.held], previous.offset, previous.end
        rows = []
        for line in scan(file, offset):
            if not line.closed:
                break  # incomplete
            offset, end = (line.offset or 0) + len(line.raw) + 1, line.raw[-10:] + b"\n"
            if line.body is not None:
                rows.append((line.number, decode(line.body), len(line.body)))
        batches = sound_batches(row_parts(rows, table, table.schema.names, str(file)))
        joined = pa.concat_tables([*held, *(pa.Table.from_batches([batch]) for batch in batches)])
        return File(source, table, state, _coded(joined.select(KEYS[table.name]), table), joined, offset, end)


def _coded(keys: pa.Table, table: Table) -> pa.Table:
    """Key columns of one chunk each, with a dictionary of what repeats itself."""
    keys = keys.combine_chunks()
    for name in _REPEATED if table.name == ROLLOUTS.name else ():
        place = keys.schema.get_field_index(name)
        keys = keys.set_column(place, name, keys[name].dictionary_encode())
    return keys


def _joined(table: Table, files: Iterable[File]) -> pa.Table:
    """The keys of several files; a nullable column that a file lacks is null."""
    empty = _coded(table.schema.empty_table().select(KEYS[table.name]), table)
    return pa.concat_tables([empty, *(f.keys for f in files if f.keys.num_rows)], promote_options="permissive")


def _is_open(source: Source) -> bool:
    return source.kind == "segment" and is_open(source, facts_of(source.path))


def _has_at(file: Path, offset: int, end: bytes) -> bool:
    """Whether the bytes of the file before ``offset`` end so."""
    with file.open("rb") as opened:
        opened.seek(offset - len(end))
        return opened.read(len(end)) == end


def _repeated(files: Iterable[File]) -> Iterator[str]:
    """A line for each run folder or file with rollouts that a larger one has, too; what is filtered of a run repeats it."""
    by_root: dict[Path, list[pa.Array]] = {}
    for file in files:
        path = file.source.path
        root = path.parent.parent if path.parent.name == "rollouts" else path
        by_root.setdefault(root, []).extend(file.keys["rollout_id"].chunks)
    if len(by_root) < 2:
        return  # one run has each rollout once
    largest = sorted(by_root.items(), key=lambda item: -sum(map(len, item[1])))
    codes, _ = codes_of(pa.chunked_array([chunk for _, chunks in largest for chunk in chunks], pa.string()))
    root_of = np.repeat(np.arange(len(largest)), [sum(map(len, chunks)) for _, chunks in largest])
    first = root_of[np.unique(codes, return_index=True)[1]][codes]
    for number, (root, chunks) in enumerate(largest):
        again = first[(root_of == number) & (first != number)]
        if len(again):
            yield f"{root}: {len(again):,} of its {sum(map(len, chunks)):,} rollouts are in {largest[again[0]][0]}, too"
