"""An export in progress: the rows that it reads, checked, and what is counted of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gymdata.rollouts.schema import EXPERIENCES, PAIRS, ROLLOUTS, Table
from gymdata.rollouts.soundness import refuse_unsound_rows
from gymdata.store.tables import scan_source

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.store.paths import Source

_BATCH_ROWS = 1024
_KEY_ROWS = 65_536


@dataclass(slots=True)
class Export:
    """An export of the rows under ``path``, and its counts so far.

    ``score``: what is written as the reward, None for the total reward; ``read``, ``written``: rows; ``further``: rows
    that are written of one that was read, beyond its first; ``lost``: what the format cannot hold → number of rows;
    ``turns``, ``turns_lost``: of formats that count them.
    """

    path: str
    format: str
    table: Table
    vocab_size: int | None
    score: str | None = None
    read: int = 0
    written: int = 0
    further: int = 0
    turns: int = 0
    turns_lost: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    #: ID of the row that is being converted or written.
    current: str | None = None

    @property
    def key(self) -> str:
        """The column that names a row."""
        return "pair_id" if self.table.name == PAIRS.name else "rollout_id"

    def add(self, other: Export) -> None:
        """Count what ``other`` has seen, too."""
        self.read += other.read
        self.further += other.further
        self.turns += other.turns
        self.turns_lost += other.turns_lost
        self.lost.update(other.lost)

    def batches(self, source: Source, columns: Sequence[str] | None, unread: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """``columns`` (None: all) of a file without the fields ``unread``, with the score in the place of the reward. Raises
        RefusedError for ids and log-probabilities that no consumer may take."""
        if self.score is not None:
            batches = self._scored(scan_source(source, self.table, columns, _BATCH_ROWS), source)
        elif unread:
            batches = scan_source(source, self.table.without(*unread), columns, _BATCH_ROWS, threads=False)
        else:
            batches = scan_source(source, self.table, columns, _BATCH_ROWS)
        for batch in batches:
            self.read += batch.num_rows
            if self.table.name != EXPERIENCES.name:  # those are checked as training checks them
                refuse_unsound_rows(batch, self.path, self.vocab_size)
            yield batch

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
            for row in of(batch):
                self.current = row[self.key]
                yield row
