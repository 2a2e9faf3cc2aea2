"""The rollouts that pairs are selected from, as numbers; and the contents of the selected ones, which are read once.

Selection sees scores, hashes and counts of every rollout. The tokens of those in pairs wait in a file without a name, from
which pairs are written in their order, a few million tokens at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.pairs.contents import COLUMNS, CONTENTS, COPIED, TOKENS, message_keys, token_columns, trained_keys
from gymdata.commands.pairs.groups import run_starts
from gymdata.commands.pairs.select import at_fork, pair_id
from gymdata.commands.pairs.settings import PairsConfig
from gymdata.errors import DataError, StoreError
from gymdata.rollouts.messages import split_messages
from gymdata.rollouts.ragged import Ints, Ragged, first_like
from gymdata.rollouts.schema import HASHES, PAIRS, ROLLOUTS
from gymdata.rollouts.sequences import require_agents
from gymdata.store import scan_batches
from gymdata.store.lineage import vocabulary
from gymdata.store.paths import Source
from gymdata.store.run_json import unnamed_file
from gymdata.store.tables import files_of, scan_source, shaped
from gymdata.workers.tuning import give_back

#: Rollouts whose messages or tokens are in memory at a time.
BATCH_ROWS = 4_096
#: What selection reads of a rollout; texts that many share are dictionaries.
_COLUMNS = ("rollout_id", "task_id", "group_id", "rollout_index", "status", "reward", "n_breaks", *HASHES)
_SHARED = ("task_id", "group_id", "status")
_FRAME = (
    "group_id",
    "rollout_id",
    "task_id",
    "rollout_index",
    "score",
    "n_generated_tokens",
    "prompt_key",
    "generation_key",
    "text_key",
)
_KEYS = ("prompt_key", "generation_key", "text_key", "context_key")


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file of rollouts, the first one's row among all, and how many there are."""

    source: Source
    vocab_size: int | None
    start: int
    rows: int


def read_contents(
    file: RolloutFile, mask: npt.NDArray[np.bool_], agents: Sequence[str], rendered: bool
) -> Iterator[pa.Table]:
    """A row of ``CONTENTS`` for each rollout of a file that is True in a mask, in batches.

    ``agents``: generations of other agents are context (empty: none are). Raises as ``stitch`` does.
    """
    start = 0
    for batch in scan_source(file.source, ROLLOUTS, COLUMNS, BATCH_ROWS):
        rows = np.flatnonzero(mask[start : start + batch.num_rows])
        start += batch.num_rows
        if not len(rows):
            continue
        picked = batch.take(pa.array(rows))
        tokens = token_columns(
            picked.column("turns"),
            picked.column("rollout_id"),
            agents,
            extra=picked.column("extra"),
            where=str(file.source.path),
            vocab_size=file.vocab_size,
            rendered=rendered,
        )
        prompt, completion = split_messages(picked.column("messages"), picked.column("n_turns").to_numpy())
        more = (*map(picked.column, COPIED), prompt, completion, picked.column("tools").dictionary_encode())
        fields = list(CONTENTS)[len(TOKENS) :]
        columns = [column.cast(field.type) for field, column in zip(fields, more, strict=True)]
        yield pa.Table.from_arrays([*tokens.columns, *columns], schema=CONTENTS)


def read_rollouts(
    sources: Sequence[str | Path], config: PairsConfig, more: Sequence[str] = ()
) -> tuple[pa.Table, list[RolloutFile]]:
    """Ids, status, numbers of all rollouts, keys by which equal ones are found, and columns ``more``; and their files.

    Keys are 0 where they are not known. Only with ``target_agents`` are tokens read: what others generated is context.
    """
    agents = config.target_agents
    if agents:
        turns = (b.column("turns") for s in sources for b in scan_batches(s, ROLLOUTS, ("turns",), BATCH_ROWS))
        require_agents(turns, agents, ", ".join(map(str, sources)))
    names = (*_COLUMNS, *more, "n_context_tokens", "n_generated_tokens", "n_turns", "messages")
    files, tables, start = [], list[pa.Table](), 0
    for path in sources:
        vocab_size = vocabulary(path)
        for source in files_of(path, ROLLOUTS):
            columns = (*names, "turns", "extra") if agents else names
            scanned = scan_source(source, ROLLOUTS, columns, BATCH_ROWS)
            batches = [_numbers(batch, (*_COLUMNS, *more), config, source, vocab_size) for batch in scanned]
            files.append(RolloutFile(source, vocab_size, start, sum(map(len, batches))))
            start += files[-1].rows
            tables += batches
    return pa.concat_tables(tables).unify_dictionaries() if tables else pa.table({}), files


def _numbers(
    batch: pa.RecordBatch, names: Sequence[str], config: PairsConfig, source: Source, vocab_size: int | None
) -> pa.Table:
    """The columns ``names``, keys and counts of tokens of a batch."""
    _, completion = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
    text, context = message_keys(completion)
    generated = batch.column("n_generated_tokens").to_numpy()
    prompt, generation = (pc.fill_null(batch.column(name), 0).to_numpy().view(np.uint64) for name in HASHES)
    counts = {"n_tokens": batch.column("n_context_tokens").to_numpy() + generated, "n_generated_tokens": generated}
    if config.target_agents:
        # Generated tokens of others are context.
        tokens = token_columns(
            batch.column("turns"),
            batch.column("rollout_id"),
            config.target_agents,
            extra=batch.column("extra"),
            where=str(source.path),
            vocab_size=vocab_size,
            rendered=bool(config.allow_rendered),
        )
        ids, mask = Ragged.of(tokens["completion_ids"]), Ragged.of(tokens["completion_mask"])
        prompt, generation = Ragged.of(tokens["prompt_ids"]).hashes(), trained_keys(ids, mask)
        counts["n_generated_tokens"] = mask.sums(mask.values)
    columns = {name: batch.column(name) for name in names}
    columns |= {name: columns[name].dictionary_encode() for name in _SHARED}
    keys = dict(zip(_KEYS, (prompt, generation, text, context), strict=True))
    return pa.table({**columns, **counts, **keys})


class Candidates:
    """Rollouts as rows of a ``frame`` to select from, and the contents of those in pairs, which wait on the disk of
    ``folder`` (None: where the system has its temporary files). To be closed."""

    def __init__(
        self, rollouts: pa.Table, files: Sequence[RolloutFile], sound: Ints, config: PairsConfig, folder: Path | None
    ) -> None:
        """``rollouts``: as ``read_rollouts`` gives them, and their ``score``; the rows ``sound`` are the frame's."""
        self._files, self._config, self._folder = files, config, folder or Path(tempfile.gettempdir())
        self._row_of = np.full(rollouts.num_rows, -1)
        self._row_of[sound] = np.arange(len(sound))
        frame_rows = rollouts if len(sound) == rollouts.num_rows else rollouts.take(pa.array(sound))
        # Keys are looked at as whole arrays, again and again.
        columns = {name: frame_rows[name].combine_chunks() if name in _KEYS else frame_rows[name] for name in _FRAME}
        same = (frame_rows[name].to_numpy() for name in ("prompt_key", "generation_key", "context_key"))
        truncated = pc.equal(frame_rows["status"], "truncated")
        self.frame = pa.table({**columns, "content_key": first_like(*same), "truncated": truncated})
        self.tokens: Ints = frame_rows["n_tokens"].to_numpy().astype(np.int64)
        #: Of the rows whose contents were read; -1 for the others.
        self.n_sequences = np.full(len(sound), -1, np.int32)
        self.abandoned_turns = np.zeros(len(sound), np.int32)
        self.rendered = np.zeros(len(sound), np.bool_)
        self._position = np.full(len(sound), -1)
        self._file: IO[bytes] | None = None
        self._ends, self._spans = [0], list[tuple[int, int]]()

    def read(self, rows: Ints) -> None:
        """Read the contents of those ``rows`` of the frame that were not read before. Raises as ``stitch``, and DataError
        when they are not the rollouts that were selected."""
        unread = np.zeros(len(self.frame) + 1, np.bool_)
        unread[rows] = self._position[rows] < 0
        jobs, frame_rows = [], [np.zeros(0, np.int64)]
        for file in self._files:
            row_of = self._row_of[file.start : file.start + file.rows]
            # The last one is for rollouts that are not in the frame, whose row is -1.
            mask = unread[row_of]
            if mask.any():
                jobs.append((file, mask))
                frame_rows.append(row_of[mask])
        order, start = np.concatenate(frame_rows), 0
        agents, rendered = self._config.target_agents, bool(self._config.allow_rendered)
        for table in (table for file, mask in jobs for table in read_contents(file, mask, agents, rendered)):
            self._add(order[start : start + table.num_rows], table)
            start += table.num_rows
        if start != len(order):
            raise self._changed()

    def _add(self, rows: Ints, table: pa.Table) -> None:
        ids = self.frame["rollout_id"].take(pa.array(rows))
        if not ids.equals(table["rollout_id"]):
            raise self._changed()
        self.n_sequences[rows] = table["n_sequences"].to_numpy()
        self.abandoned_turns[rows] = table["abandoned_turns"].to_numpy()
        self.rendered[rows] = table["rendered"].to_numpy()
        try:
            if self._file is None:
                self._file = unnamed_file(self._folder)
            begin = self._file.seek(0, 2)
            with pa.ipc.new_stream(pa.PythonFile(self._file, "w"), table.schema) as writer:
                writer.write_table(table.combine_chunks())
            self._file.flush()
        except OSError as error:
            raise StoreError.from_os(self._folder, error) from error
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
    source: str
    score_name: str
    fork: bool
    rendered: bool = False

    def __len__(self) -> int:
        return len(self.margin)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        tokens = self.candidates.tokens[self.chosen] + self.candidates.tokens[self.rejected] + _ROW_TOKENS
        starts = run_starts((np.cumsum(tokens) - tokens) // PAIR_TOKENS)
        slices = [slice(a, b) for a, b in pairwise([*starts.tolist(), len(self)])]
        rows = (np.concatenate((self.chosen[part], self.rejected[part])) for part in slices)
        for part, (rollouts, row_of) in zip(slices, self.candidates.contents(rows), strict=True):
            chosen, rejected = np.split(row_of, 2)
            yield from self._table(rollouts, chosen, rejected, self.margin[part]).to_batches()
            give_back()

    def _table(self, rollouts: pa.Table, chosen: Ints, rejected: Ints, margin: npt.NDArray[np.float64]) -> pa.Table:
        """The pairs of the rows ``chosen`` and ``rejected`` of ``rollouts`` (``CONTENTS``)."""
        better, worse = rollouts.take(pa.array(chosen)), rollouts.take(pa.array(rejected))
        ids = zip(better["rollout_id"].to_pylist(), worse["rollout_id"].to_pylist(), strict=True)
        n = len(margin)
        columns: dict[str, Any] = {
            "pair_id": pa.array([pair_id(a, b, self.source, self.score_name) for a, b in ids], pa.string()),
            **{name: better[name] for name in ("run_id", "task_id")},
            "tools": better["tools"],
            "prompt": better["prompt_messages"],
            "chosen": better["completion_messages"],
            "rejected": worse["completion_messages"],
            "chosen_rollout_id": better["rollout_id"],
            "rejected_rollout_id": worse["rollout_id"],
            "margin": pa.array(margin),
            "weight": pa.array(np.ones(n)),
            "source": pa.array([self.source] * n, pa.string()),
            "score": pa.array([self.score_name] * n, pa.string()),
            **{name: better[name] for name in ("policy_hash", "policy_version", "temperature")},
            "prompt_ids": better["prompt_ids"],
        }
        for part in ("ids", "mask", "logprobs"):
            columns[f"chosen_{part}"] = better[f"completion_{part}"]
            columns[f"rejected_{part}"] = worse[f"completion_{part}"]
        if self.rendered:
            columns["rendered"] = pc.or_(better["rendered"], worse["rendered"])
        table = shaped(pa.table(columns), PAIRS)
        return at_fork(table) if self.fork else table

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

    def only(self, chosen: npt.NDArray[np.bool_]) -> PairBatches:
        """The pairs that are True in ``chosen``."""
        return replace(self, chosen=self.chosen[chosen], rejected=self.rejected[chosen], margin=self.margin[chosen])

    def table(self) -> pa.Table:
        """All pairs in memory."""
        return pa.Table.from_batches(self, self.schema)
