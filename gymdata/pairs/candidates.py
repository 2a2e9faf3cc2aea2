"""The rollouts that pairs are made of: numbers of all in memory, tokens and messages apart; and the pairs, in batches.

Invariants: of every rollout only numbers and ids stay in memory; what a pair is made of waits in the order in which pairs
are written, and is read and written a few million tokens at a time; the order of the rollouts changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import RefusedError, counted
from gymdata.pairs import select
from gymdata.pairs.contents import COLUMNS, CONTENTS
from gymdata.pairs.in_pieces import Contents, in_pieces, refuse_changed
from gymdata.pairs.settings import PairsConfig
from gymdata.pairs.spill import Spill
from gymdata.rollouts.ragged import Array, Ints, Ragged, content_codes, joined_keys
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import require_agents
from gymdata.store import scan_batches
from gymdata.store.lineage import rows_of, vocabulary
from gymdata.workers.tuning import give_back

#: Rollouts whose tokens are in memory at a time while they are turned into flat columns.
BATCH_ROWS = 4_096
#: Tokens of a bucket's rollouts, and of a batch of pairs.
BUCKET_TOKENS, PAIR_TOKENS = 2_000_000, 1_000_000
#: The size of a rollout besides its tokens, in tokens.
_ROW_TOKENS = 50
#: Numbers that stay in memory, and that decide about pairs. Of a rollout that no pair can need they are 0.
_NUMBERS = {"prompt_key": np.uint64, "generation_key": np.uint64, "text_key": np.uint64, "n_sequences": np.int32,
            "abandoned_turns": np.int32, "rendered": np.bool_}  # fmt: skip
#: Columns that are spilled; ``row``: of the frame.
_APART = pa.schema(
    [field for field in CONTENTS if field.name not in _NUMBERS or field.name == "rendered"]
    + [pa.field("row", pa.int64())]
)


class Candidates(Spill):
    """Rollouts as rows of a ``frame`` to select from, and the contents of their pairs, by ``bucket``: bands of groups
    in the order of their ids. To be closed.

    ``folder``: on whose disk tokens wait when they are many; None: where the system has its temporary files.
    """

    def __init__(self, config: PairsConfig, folder: Path | None) -> None:
        super().__init__(_APART, folder)
        self._config = config
        self.frame = pa.table({})
        self.bucket_of: Ints = np.zeros(0, np.int64)

    def read(self, sources: Sequence[str | Path], rollouts: pa.Table, sound: Ints) -> pa.Table:
        """The frame of the rows ``sound`` of ``rollouts``, as ``select_pairs`` takes it.

        ``rollouts``: ids, status, counts and ``score`` of all rollouts under ``sources``, in their order. Raises
        RefusedError for rollouts without tokens, or with unsound ones.
        """
        config = self._config
        some = rollouts if len(sound) == rollouts.num_rows else rollouts.take(pa.array(sound))
        needed = select.eligible(some, config.strategy, config.min_margin)
        self.bucket_of = _buckets(some, needed)
        row_of = np.full(rollouts.num_rows, -1)
        row_of[sound[needed]] = np.flatnonzero(needed)
        names = ("group_id", "rollout_id", "task_id", "rollout_index", "score", "n_generated_tokens")
        columns = {name: some[name] for name in names}
        columns["truncated"] = pc.equal(some["status"], "truncated")
        columns |= self._read_tokens(sources, rollouts["rollout_id"], row_of, len(needed))
        give_back()
        self.frame = pa.table(columns)
        return self.frame

    def _read_tokens(
        self, sources: Sequence[str | Path], ids: pa.ChunkedArray, row_of: Ints, n: int
    ) -> dict[str, Array]:
        """Columns of the frame, of ``n`` rows. ``row_of``: the row of each of ``ids``, -1 for what no pair can need."""
        agents, unique = self._config.target_agents, not self._config.keep_duplicates
        numbers: dict[str, Array] = {name: np.zeros(n, kind) for name, kind in _NUMBERS.items()}
        if agents:
            # Generated tokens of others are context.
            numbers["n_generated_tokens"] = np.zeros(n, np.int64)
            turns = (
                batch.column("turns") for s in sources for batch in scan_batches(s, ROLLOUTS, ("turns",), BATCH_ROWS)
            )
            require_agents(turns, agents, ", ".join(map(str, sources)))
        keyed: list[tuple[Ints, bytes]] = []
        for rows, part in self._parts(sources, ids, row_of):
            for name in _NUMBERS:
                numbers[name][rows] = part[name].to_numpy()
            if agents:
                masks = Ragged.of(part["completion_mask"])
                numbers["n_generated_tokens"][rows] = masks.sums(masks.values)
            if unique:
                keys = joined_keys([Ragged.of(part[name]).keys() for name in ("prompt_ids", "completion_ids")])
                keyed.append((rows, b"".join(keys)))
            apart = part.select(_APART.names[:-1]).append_column(_APART.field("row"), pa.array(rows))
            self.add(apart, self.bucket_of[rows])
        read = np.zeros(n, np.bool_)
        read[row_of[row_of >= 0]] = True
        _refuse_without_tokens(numbers["n_sequences"][read])
        if keyed:
            numbers["content_key"] = np.zeros(n, np.int64)
            of = np.concatenate([rows for rows, _ in keyed])
            whole = np.frombuffer(b"".join(keys for _, keys in keyed), "V32")
            numbers["content_key"][of] = content_codes(whole)
        return numbers

    def _parts(
        self, sources: Sequence[str | Path], ids: pa.ChunkedArray, row_of: Ints
    ) -> Iterator[tuple[Ints, pa.Table]]:
        """Rows of the frame, and the ``CONTENTS`` of their rollouts, in the order of the sources."""
        at = 0
        for source in sources if (row_of >= 0).any() else ():
            rendered = bool(self._config.allow_rendered)
            work = Contents(self._config.target_agents, str(source), vocabulary(source), rendered, BATCH_ROWS)
            divided = in_pieces(source, work, row_of[at:] >= 0, self._config.workers)
            if divided is not None:
                for names, made in divided:
                    rows = _rows(names, ids, at, row_of)
                    refuse_changed(source, _at(row_of, at, len(names)) >= 0, rows >= 0)
                    at += len(names)
                    if made is not None:
                        yield rows[rows >= 0], made
                continue
            for batch in scan_batches(source, ROLLOUTS, COLUMNS, BATCH_ROWS):
                rows = _rows(batch.column("rollout_id"), ids, at, row_of)
                at += batch.num_rows
                if not (rows >= 0).all():
                    batch, rows = batch.filter(pa.array(rows >= 0)), rows[rows >= 0]
                if len(rows):
                    yield rows, work.of(batch)


def _rows(names: pa.Array, ids: pa.ChunkedArray, at: int, row_of: Ints) -> Ints:
    """The row of the frame of each rollout of a batch; -1 for what is not needed."""
    found = rows_of(names, ids, at)
    return np.where(found >= 0, row_of[found], -1)


def _at(row_of: Ints, at: int, n: int) -> Ints:
    """``n`` entries from ``at``; -1 for rows that were not there when they were counted."""
    some = np.full(n, -1)
    known = row_of[at : at + n]
    some[: len(known)] = known
    return some


def _buckets(rollouts: pa.Table, needed: npt.NDArray[np.bool_]) -> Ints:
    """The bucket of each row: groups follow each other in their order until their needed rollouts have enough tokens."""
    group, n_groups = select.group_ranks(rollouts)
    tokens = sum(rollouts[name].to_numpy() for name in ("n_context_tokens", "n_generated_tokens")) + _ROW_TOKENS
    of_group = np.bincount(group, np.where(needed, tokens, 0), n_groups)
    before = np.cumsum(of_group) - of_group
    bucket: Ints = (before // BUCKET_TOKENS).astype(np.int64)
    return bucket[group]


def _refuse_without_tokens(n_sequences: Array) -> None:
    without = int((n_sequences == 0).sum())
    if without:
        raise RefusedError(
            f"{without:,} of {counted(len(n_sequences), 'rollout')} have no token ids, so no pair of them can "
            "be trained as sampled",
            code="T205",
            hint="collect with gymdata, import files that carry token ids, or render ids with `gymdata tokenize`",
        )


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
        bucket = self.candidates.bucket_of[self.chosen]
        for pairs in _runs(bucket):
            rollouts = self.candidates.bucket(int(bucket[pairs.start]))
            rows = rollouts["row"].to_numpy()
            order = np.argsort(rows)
            sides = (self.chosen[pairs], self.rejected[pairs])
            chosen, rejected = (order[np.searchsorted(rows, side, sorter=order)] for side in sides)
            lists = (rollouts["prompt_ids"], rollouts["completion_ids"])
            prompt, completion = (pc.list_value_length(one).to_numpy() for one in lists)
            tokens = (prompt + completion)[chosen] + completion[rejected] + _ROW_TOKENS
            for some in _runs((np.cumsum(tokens, dtype=np.int64) - tokens) // PAIR_TOKENS):
                table = self._table(rollouts, chosen[some], rejected[some], self.margin[pairs][some])
                yield from table.to_batches()
            del rollouts, table
            give_back()

    def _table(self, rollouts: pa.Table, chosen: Ints, rejected: Ints, margin: npt.NDArray[np.float64]) -> pa.Table:
        table = select.pair_rows(
            rollouts, chosen, rejected, margin, source=self.source, score_name=self.score_name, rendered=self.rendered
        )
        return select.at_fork(table) if self.fork else table

    @property
    def schema(self) -> pa.Schema:
        none = np.zeros(0, np.int64)
        return self._table(_APART.empty_table(), none, none, np.zeros(0)).schema

    @property
    def task_ids(self) -> pa.ChunkedArray:
        return self.candidates.frame["task_id"].take(pa.array(self.chosen))

    @property
    def n_rendered(self) -> int:
        """How many have a side whose ids were rendered from text."""
        rendered = self.candidates.frame["rendered"].to_numpy()
        return int((rendered[self.chosen] | rendered[self.rejected]).sum())

    def only(self, kept: npt.NDArray[np.bool_]) -> PairBatches:
        """The pairs that are True in ``kept``."""
        return replace(self, chosen=self.chosen[kept], rejected=self.rejected[kept], margin=self.margin[kept])

    def table(self) -> pa.Table:
        """All pairs in memory."""
        return pa.Table.from_batches(self, self.schema)


def _runs(values: Array) -> Iterator[slice]:
    """Where equal values follow each other."""
    begin = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    yield from map(slice, begin.tolist(), [*begin[1:].tolist(), len(values)])
