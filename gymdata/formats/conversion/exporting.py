"""An export in progress: the rows that it reads, checked, and what is counted of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gymdata.formats.conversion.importing import ODD
from gymdata.formats.conversion.rows import KINDS, OF_TURNS
from gymdata.rollouts.ragged import Ragged, list_parts
from gymdata.rollouts.schema import EXPERIENCES, PAIRS, ROLLOUTS, Table
from gymdata.rollouts.soundness import refuse_unsound_rows
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store.journal import read_failures
from gymdata.store.lineage import keys_of, refuse_repeats
from gymdata.store.tables import scan_source

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.store.paths import Source

_BATCH_ROWS = 1024
_KEY_ROWS = 65_536
_FACTS = ("agent", "server", "weight_versions")
NO_MESSAGE = "turns that no message names"


@dataclass(slots=True)
class Export:
    """An export of the rows under ``path``, and its counts so far.

    ``score``: what is written as the reward, None for the total reward; ``read``, ``written``: rows; ``further``: rows
    that are written of one that was read, beyond its first; ``lost``: what the format cannot hold → number of rows;
    ``totals``, ``carried``: how many of each of ``KINDS`` were read and written, weights that are 1 apart. A branch is a
    turn that does not continue the turn before it.
    """

    path: str
    format: str
    table: Table
    vocab_size: int | None
    score: str | None = None
    read: int = 0
    written: int = 0
    further: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    carried: Counter[str] = field(default_factory=Counter)
    #: Hashes of the ids of the rollouts that were read (see ``keys_of``).
    _keys: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    #: ID of the row that is being converted or written.
    current: str | None = None
    #: Of the batch that was given last: kind → a number per row, or a list of them per turn; and the row in it.
    _holds: Mapping[str, Any] = field(default_factory=dict)
    _row: int = 0

    @property
    def key(self) -> str:
        """The column that names a row."""
        return "pair_id" if self.table.name == PAIRS.name else "rollout_id"

    def carry(self, kinds: Iterable[str], turns: Collection[int] | None = None, rows: Any = None) -> None:
        """Count the current row as written, or ``rows`` (indices) of the current batch, with what it holds of ``kinds``;
        ``turns``: those of its turns that are written, None for all."""
        for kind in kinds:
            values = self._holds[kind]
            for row in [self._row] if rows is None else rows:
                of_row = values[row]
                self.carried[kind] += int(np.sum(of_row if turns is None or kind not in OF_TURNS else of_row[[*turns]]))
        if turns is not None:
            self.lost[NO_MESSAGE] += len(self._holds["turns"][self._row]) - len(turns)

    def account(self) -> dict[str, dict[str, int]]:
        """Of each kind: how many there were, were written, and are lost. No format has a place for failed attempts."""
        totals, kinds = self.totals, KINDS[self.table.name]
        if self.table.name == ROLLOUTS.name:
            totals, kinds = totals + Counter({"failures": len(read_failures(self.path))}), (*kinds, "failures")
        return {k: {"read": totals[k], "written": self.carried[k], "lost": totals[k] - self.carried[k]} for k in kinds}

    def batches(self, source: Source, columns: Sequence[str] | None, unread: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """``columns`` (None: all) of a file without the fields ``unread``, with the score in the place of the reward. Raises
        RefusedError for ids and log-probabilities that no consumer may take."""
        table = self.table.without(*unread) if unread else self.table
        batches = scan_source(source, table, columns, _BATCH_ROWS, threads=not unread)
        if self.score is not None:
            batches = self._scored(batches, source)
        for batch in batches:
            self.read += batch.num_rows
            if self.table.name == ROLLOUTS.name:
                self._keys.append(keys_of(batch.column("rollout_id")))
            if self.table.name != EXPERIENCES.name:  # those are checked as training checks them
                refuse_unsound_rows(batch, self.path, self.vocab_size)
            self._holds = _contents_of(batch)
            self.totals.update({kind: int(np.sum(getattr(n, "values", n))) for kind, n in self._holds.items()})
            yield batch

    def refuse_repeats(self, sources: Sequence[Source]) -> None:
        """Raises RefusedError (D701) for a rollout that is in ``sources``, which were read, more than once."""
        if self._keys:
            ids = (batch.column(0) for source in sources for batch in scan_source(source, ROLLOUTS, ("rollout_id",)))
            refuse_repeats(np.concatenate(self._keys), ids, [self.path])

    def _scored(self, batches: Iterator[pa.RecordBatch], source: Source) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from gymdata.scores.chosen import with_score

        keys = pa.Table.from_batches(scan_source(source, ROLLOUTS, ("rollout_id", "reward", "rewards"), _KEY_ROWS))
        rewards, row = with_score([self.path], keys, self.score)[0]["reward"].combine_chunks(), 0
        for batch in batches:
            values = rewards.slice(row, batch.num_rows)
            yield batch.set_column(batch.schema.get_field_index("reward"), "reward", values)
            row += batch.num_rows

    def rows(self, batches: Iterable[pa.RecordBatch], of: Callable[[pa.RecordBatch], Iterable[Any]]) -> Iterator[Any]:
        """The rows that ``of`` makes of each batch; errors name the row that was given last."""
        for batch in batches:
            try:
                rows = of(batch)
            except ODD:
                rows = self._one_by_one(batch, of)
            for self._row, row in enumerate(rows):
                self.current = row[self.key]
                yield row

    def _one_by_one(self, batch: pa.RecordBatch, of: Callable[[pa.RecordBatch], Iterable[Any]]) -> Iterator[Any]:
        """The rows of a batch that cannot be read as a whole: the error is that of the row in which it is."""
        for number in range(batch.num_rows):
            self.current = batch.column(self.key)[number].as_py()
            yield from of(batch.slice(number, 1))


def _contents_of(batch: pa.RecordBatch) -> dict[str, Any]:
    """Kind → a number per row, or a list with a number per turn."""
    columns = set(batch.schema.names)
    holds: dict[str, Any] = {}
    for kind, name, absent in (("weights", "weight", 1.0), ("margins", "margin", np.nan)):
        if name in columns:
            values = batch.column(name).to_numpy(zero_copy_only=False)
            holds[kind] = (values != absent) & np.isfinite(values)
    if "turns" not in columns:
        return holds
    offsets, fields = list_parts(batch.column("turns"))
    turns, lists = TurnColumns.of(batch.column("turns")), Ragged(np.ones(len(fields), np.int64), offsets)
    valid = {f.name: fields.field(f.name).is_valid().to_numpy(zero_copy_only=False) for f in fields.type}
    # Not only the parent's: a retry of the turn before shares a part of it.
    follows = (turns.parent == turns.number - 1) & ((turns.number == 0) | (turns.prefix == turns.max_prefix))
    facts = np.sum([valid[name] for name in _FACTS], axis=0)
    holds |= {
        kind: lists.like(n) for kind, n in zip(OF_TURNS, (lists.values, ~follows, valid["reward"], facts), strict=True)
    }
    part_offsets, parts = list_parts(batch.column("rewards"))
    scored = parts.field("value").is_valid().to_numpy(zero_copy_only=False)
    holds["rewards"] = batch.column("reward").is_valid().to_numpy(zero_copy_only=False)
    return holds | {"named rewards": Ragged(scored, part_offsets).sums(scored)}
