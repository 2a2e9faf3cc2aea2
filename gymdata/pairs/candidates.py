"""The rollouts that pairs are selected from, as numbers; and the contents of the selected ones, which are read once.

Selection sees scores, hashes and counts of every rollout. The tokens of those in pairs wait in an unnamed temporary file,
from which pairs are written in their order, a few million tokens at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, StoreError
from gymdata.pairs import select
from gymdata.pairs.contents import COLUMNS, CONTENTS, contents, message_keys, token_columns, trained_keys
from gymdata.pairs.groups import run_starts
from gymdata.pairs.settings import PairsConfig
from gymdata.rollouts.messages import split_messages
from gymdata.rollouts.ragged import Array, Ints, Ragged, first_like
from gymdata.rollouts.schema import HASHES, ROLLOUTS
from gymdata.rollouts.sequences import require_agents
from gymdata.store import scan_batches
from gymdata.store.lineage import rows_of, vocabulary
from gymdata.store.paths import Source
from gymdata.store.tables import files_of, scan_source
from gymdata.workers.processes import in_order
from gymdata.workers.tuning import give_back

#: Rollouts whose messages or tokens are in memory at a time.
BATCH_ROWS = 4_096
_COPIED = ("group_id", "rollout_id", "task_id", "rollout_index", "score", "n_generated_tokens")


@dataclass(frozen=True, slots=True)
class _File:
    """A file of rollouts, and which rows of the frame it holds; -1 for rows that are not in the frame."""

    source: Source
    path: str | Path
    rows: Ints


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The rows of a file whose contents are read, True in ``mask``."""

    source: Source
    vocab_size: int | None
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Reader:
    """The contents of a file's wanted rows, in batches, here or in a worker."""

    agents: Sequence[str]
    rendered: bool

    def __call__(self, wanted: _Wanted) -> Iterator[pa.Table]:
        start = 0
        for batch in scan_source(wanted.source, ROLLOUTS, COLUMNS, BATCH_ROWS):
            mask = wanted.mask[start : start + batch.num_rows]
            start += batch.num_rows
            rows = np.flatnonzero(mask)
            if len(rows):
                some = batch.take(pa.array(rows))
                where, size = str(wanted.source.path), wanted.vocab_size
                yield contents(some, self.agents, where=where, vocab_size=size, rendered=self.rendered)


class Candidates:
    """Rollouts as rows of a ``frame`` to select from, and the contents of those in pairs. To be closed.

    ``folder``: on whose disk the tokens wait; None: where the system has its temporary files.
    """

    def __init__(
        self, sources: Sequence[str | Path], rollouts: pa.Table, sound: Ints, config: PairsConfig, folder: Path | None
    ) -> None:
        """``rollouts``: ids, status, counts, hashes and ``score`` of all rollouts under ``sources``, in their order; the
        rows ``sound`` of them are the frame's."""
        self._config, self._folder = config, folder
        self._reader = _Reader(config.target_agents, bool(config.allow_rendered))
        row_of = np.full(rollouts.num_rows, -1)
        row_of[sound] = np.arange(len(sound))
        some = rollouts if len(sound) == rollouts.num_rows else rollouts.take(pa.array(sound))
        numbers = self._read_keys(sources, rollouts, row_of, len(sound))
        columns = {name: some[name] for name in _COPIED if name not in numbers}
        self.frame = pa.table({**columns, **numbers, "truncated": pc.equal(some["status"], "truncated")})
        self.tokens: Ints = (some["n_context_tokens"].to_numpy() + some["n_generated_tokens"].to_numpy()).astype(
            np.int64
        )
        #: Of the rows whose contents were read; -1 for the others.
        self.n_sequences = np.full(len(sound), -1, np.int32)
        self.abandoned_turns = np.zeros(len(sound), np.int32)
        self.rendered = np.zeros(len(sound), np.bool_)
        self._position = np.full(len(sound), -1)
        self._file: IO[bytes] | None = None
        self._ends, self._spans = [0], list[tuple[int, int]]()

    def _read_keys(self, sources: Sequence[str | Path], rollouts: pa.Table, row_of: Ints, n: int) -> dict[str, Array]:
        """The columns of the frame by which equal rollouts are found, and the number of trained tokens of some agents."""
        agents, ids = self._config.target_agents, rollouts["rollout_id"]
        lacking = any(rollouts[name].null_count for name in HASHES)
        names = ("rollout_id", "n_turns", "messages", *HASHES, *(("turns",) if agents or lacking else ()))
        numbers: dict[str, Array] = {
            name: np.zeros(n, np.uint64) for name in ("prompt_key", "generation_key", "text_key", "context_key")
        }
        if agents:
            turns = (b.column("turns") for s in sources for b in scan_batches(s, ROLLOUTS, ("turns",), BATCH_ROWS))
            require_agents(turns, agents, ", ".join(map(str, sources)))
            numbers["n_generated_tokens"] = np.zeros(n, np.int64)
        self._files, at = [], 0
        for path in sources:
            for source in files_of(path, ROLLOUTS):
                rows_in_file = [np.zeros(0, np.int64)]
                for batch in scan_source(source, ROLLOUTS, names, BATCH_ROWS):
                    known = rows_of(batch.column("rollout_id"), ids, at)
                    at += batch.num_rows
                    rows = np.where(known >= 0, row_of[known], -1)
                    rows_in_file.append(rows)
                    for name, values in self._keys(batch, source, path).items():
                        numbers[name][rows[rows >= 0]] = values[rows >= 0]
                self._files.append(_File(source, path, np.concatenate(rows_in_file)))
        columns = ("prompt_key", "generation_key", "context_key")
        numbers["content_key"] = first_like(*(numbers[name] for name in columns))
        del numbers["context_key"]
        return numbers

    def _keys(self, batch: pa.RecordBatch, source: Source, path: str | Path) -> dict[str, Array]:
        _, completion = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
        text, context = message_keys(completion)
        keys = {"text_key": text, "context_key": context}
        if not self._config.target_agents:
            hashes = (pc.fill_null(batch.column(name), 0).to_numpy(zero_copy_only=False) for name in HASHES)
            prompt, generation = (column.view(np.uint64) for column in hashes)
            return {**keys, "prompt_key": prompt, "generation_key": generation}
        # Generated tokens of others are context.
        tokens = token_columns(
            batch.column("turns"), batch.column("rollout_id"), self._config.target_agents, where=str(source.path),
            vocab_size=vocabulary(path), rendered=self._reader.rendered,
        )  # fmt: skip
        prompt, completion, mask = (
            Ragged.of(tokens[f"{x}"]) for x in ("prompt_ids", "completion_ids", "completion_mask")
        )
        trained = trained_keys(completion, mask)
        return {
            **keys,
            "prompt_key": prompt.hashes(),
            "generation_key": trained,
            "n_generated_tokens": mask.sums(mask.values),
        }

    def read(self, rows: Ints) -> None:
        """Read the contents of those ``rows`` of the frame that were not read before. Raises as ``contents``, and DataError
        when they are not the rollouts that were selected."""
        wanted = np.zeros(len(self.frame), np.bool_)
        wanted[rows] = True
        wanted &= self._position < 0
        jobs, frame_rows = [], [np.zeros(0, np.int64)]
        for file in self._files:
            mask = file.rows >= 0
            mask[mask] = wanted[file.rows[mask]]
            if mask.any():
                jobs.append(_Wanted(file.source, vocabulary(file.path), mask))
                frame_rows.append(file.rows[mask])
        order, at = np.concatenate(frame_rows), 0
        tables = in_order(self._reader, jobs, self._config.workers, lambda job: str(job.source.path))
        with contextlib.closing(tables):
            for table in tables:
                self._add(order[at : at + table.num_rows], table)
                at += table.num_rows
        if at != len(order):
            raise self._changed()

    def _add(self, rows: Ints, table: pa.Table) -> None:
        ids = self.frame["rollout_id"].take(pa.array(rows))
        if not ids.equals(table["rollout_id"]):
            raise self._changed()
        for name, numbers in (
            ("n_sequences", self.n_sequences), ("abandoned_turns", self.abandoned_turns), ("rendered", self.rendered)
        ):  # fmt: skip
            numbers[rows] = table[name].to_numpy()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - open until this is closed
            begin = self._file.seek(0, 2)
            with pa.ipc.new_stream(pa.PythonFile(self._file, "w"), table.schema) as writer:
                writer.write_table(table.combine_chunks())
            self._file.flush()
        except OSError as error:
            raise StoreError.from_os(self._folder or Path(tempfile.gettempdir()), error) from error
        self._position[rows] = self._ends[-1] + np.arange(len(rows))
        self._ends.append(self._ends[-1] + len(rows))
        self._spans.append((begin, self._file.tell()))

    @staticmethod
    def _changed() -> DataError:
        return DataError("the rollouts changed while they were read", hint="run the command again")

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the same disk error would be raised again
                self._file.close()
        self._file = None

    def contents(self, groups: Iterable[Ints]) -> Iterator[tuple[pa.Table, Ints]]:
        """For each of ``groups`` of rows, which ``read`` has read: a table of their contents, each once, and the row of the
        table for each of them."""
        if self._file is None:
            return
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        data = pa.py_buffer(mapped)
        for rows in groups:
            position, row_of = np.unique(self._position[rows], return_inverse=True)
            bounds = np.searchsorted(position, self._ends)
            parts = []
            for number in np.flatnonzero(np.diff(bounds)).tolist():
                begin, end = self._spans[number]
                (batch,) = pa.ipc.open_stream(data.slice(begin, end - begin))
                parts.append(batch.take(pa.array(position[bounds[number] : bounds[number + 1]] - self._ends[number])))
            yield pa.Table.from_batches(parts).unify_dictionaries().combine_chunks(), row_of
            # Pages that were read would count as this process's memory.
            mapped.madvise(mmap.MADV_DONTNEED)


#: Tokens of a batch of pairs, and what a rollout weighs besides its tokens.
PAIR_TOKENS, _ROW_TOKENS = 1_000_000, 50


@dataclass(frozen=True, slots=True)
class PairBatches:
    """Selected pairs in their order, as record batches of ``schema``; they can be gone through more than once.

    ``chosen``, ``rejected``: rows of the candidates' frame, sorted by group; ``rendered``: whether there is that column;
    ``fork``: whether prompts end where the two sides part.
    """

    candidates: Candidates
    chosen: Ints
    rejected: Ints
    margin: npt.NDArray[np.float64]
    source: Literal["reward", "genrm"]
    score_name: str
    fork: bool
    rendered: bool = False

    def __len__(self) -> int:
        return len(self.margin)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        tokens = self.candidates.tokens[self.chosen] + self.candidates.tokens[self.rejected] + _ROW_TOKENS
        starts = run_starts((np.cumsum(tokens) - tokens) // PAIR_TOKENS)
        some = [slice(a, b) for a, b in pairwise([*starts.tolist(), len(self)])]
        rows = (np.concatenate((self.chosen[part], self.rejected[part])) for part in some)
        for part, (rollouts, row_of) in zip(some, self.candidates.contents(rows), strict=True):
            chosen, rejected = np.split(row_of, 2)
            yield from self._table(rollouts, chosen, rejected, self.margin[part]).to_batches()
            give_back()

    def _table(self, rollouts: pa.Table, chosen: Ints, rejected: Ints, margin: npt.NDArray[np.float64]) -> pa.Table:
        table = select.pair_rows(
            rollouts, chosen, rejected, margin, source=self.source, score_name=self.score_name, rendered=self.rendered
        )
        return select.at_fork(table) if self.fork else table

    @property
    def schema(self) -> pa.Schema:
        none = np.zeros(0, np.int64)
        return self._table(CONTENTS.empty_table(), none, none, np.zeros(0)).schema

    @property
    def task_ids(self) -> pa.ChunkedArray:
        return self.candidates.frame["task_id"].take(pa.array(self.chosen))

    @property
    def n_rendered(self) -> int:
        """How many have a side whose ids were rendered from text."""
        rendered = self.candidates.rendered
        return int((rendered[self.chosen] | rendered[self.rejected]).sum())

    def only(self, kept: npt.NDArray[np.bool_]) -> PairBatches:
        """The pairs that are True in ``kept``."""
        return replace(self, chosen=self.chosen[kept], rejected=self.rejected[kept], margin=self.margin[kept])

    def table(self) -> pa.Table:
        """All pairs in memory."""
        return pa.Table.from_batches(self, self.schema)
