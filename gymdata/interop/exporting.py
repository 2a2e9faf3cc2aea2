"""Converts the rows of a table to another project's format, in this process or in several.

Invariants: the result of a row does not depend on its neighbours; a row that a writer cannot convert is named.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError
from gymdata.interop import formats
from gymdata.interop.importing import ODD, reason_of
from gymdata.interop.text_export import UNREAD, WRITERS
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, TABLES
from gymdata.rollouts.soundness import refuse_unsound_rows
from gymdata.store.columns import to_rows
from gymdata.store.tables import scan_source
from gymdata.workers.processes import in_order
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.store.paths import Source

DIGITS = "digits of log-probabilities beyond float32"
_BATCH_ROWS = 1024
_KEY_ROWS = 65_536
#: Bytes of rows that are converted at once.
_TEXT_BYTES = 8 << 20


@dataclass(slots=True)
class Export:
    """An export of the rows under ``path``, and its counts so far.

    ``score``: what is written as the reward, None for the total reward; ``seen``: rows read; ``lost``: what the format
    cannot hold → number of rows; ``turns``, ``turns_lost``: of NeMo Gym rows.
    """

    path: str
    format: str
    vocab_size: int | None
    score: str | None = None
    seen: int = 0
    turns: int = 0
    turns_lost: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    #: ID of the row that is being converted or written.
    current: str | None = None

    def made(self, sources: Sequence[Source], workers: int) -> Iterator[Any]:
        """Converted rows for ``formats.write``; of text formats ``Lines``."""
        if workers == 1:
            yield from self._made(batch for source in sources for batch in self._batches(source))
            return
        with contextlib.closing(in_order(self, sources, workers, lambda source: str(source.path))) as done:
            for rows, account in done:
                self.seen += account.seen
                self.turns += account.turns
                self.turns_lost += account.turns_lost
                for what, n in account.lost.items():
                    self.lost[what] += n
                for self.current, row in rows:
                    yield row

    def __call__(self, source: Source) -> Iterator[tuple[list[tuple[str | None, Any]], Export]]:
        """Convert a file, in a worker: (ID, result) per row, and the counts."""
        mine = replace(self, lost=Counter())
        with rare_collections():
            try:
                rows = [(mine.current, row) for row in mine._made(mine._batches(source))]
            except DataError:
                raise
            except ODD as error:
                raise mine.unwritable(error) from error
        yield rows, mine

    def unwritable(self, error: Exception) -> DataError:
        """The error for a row whose JSON (messages, tools, extra) a writer cannot handle."""
        kind = "pair" if formats.table_of(self.format) == PAIRS.name else "rollout"
        return DataError.unwritable_row(f"{self.path}: {kind} {self.current}", self.format, reason_of(error))

    def _batches(self, source: Source) -> Iterator[pa.RecordBatch]:
        table, names = TABLES[formats.table_of(self.format)], formats.columns(self.format)
        if self.format in WRITERS and self.score is None:
            return scan_source(source, table.without(*UNREAD), names, _BATCH_ROWS, threads=False)
        batches = scan_source(source, table, names, _BATCH_ROWS)
        return batches if self.score is None else self._scored(batches, source)

    def _scored(self, batches: Iterator[pa.RecordBatch], source: Source) -> Iterator[pa.RecordBatch]:
        """``batches``, all of a file, with the score in the place of the reward."""
        import pyarrow as pa

        from gymdata.scores.chosen import with_score

        keys = pa.Table.from_batches(scan_source(source, ROLLOUTS, ("rollout_id", "reward", "rewards"), _KEY_ROWS))
        rewards, row = with_score([self.path], keys, self.score)[0]["reward"].combine_chunks(), 0
        for batch in batches:
            values = rewards.slice(row, batch.num_rows)
            yield batch.set_column(batch.schema.get_field_index("reward"), "reward", values)
            row += batch.num_rows

    def _made(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
        if self.format == "nemo-gym":
            from gymdata.interop.nemo_gym.token_text import rows as with_texts
            from gymdata.interop.nemo_gym.write import nemo_gym_line

            for row in self._rows(batches, with_texts):
                line = nemo_gym_line(row)
                self.turns += row["n_turns"]
                self.turns_lost += line.lost
                self.lost[DIGITS] += line.rounded
                yield line.text
            return
        if self.format in WRITERS:
            for batch in self._checked(batches):
                # Smaller batches of rows with long texts, to bound memory.
                size = max(1, batch.num_rows * _TEXT_BYTES // max(1, _texts(batch)))
                for start in range(0, batch.num_rows, size):
                    yield from self._text(batch.slice(start, size))
            return
        writer = formats.writer_of(self.format)
        for row in self._rows(batches, to_rows):
            made = writer(row, self.lost)
            if made is not None:
                yield made

    def _text(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """The lines of a batch in a text format. When a row cannot be converted, each row is converted alone, to name
        that row."""
        lost: Counter[str] = Counter()
        try:
            made = WRITERS[self.format][0](batch, lost)
        except ODD:
            if batch.num_rows == 1:
                self.current = batch.column(self._name)[0].as_py()
                raise
            for row in range(batch.num_rows):
                yield from self._text(batch.slice(row, 1))
            return
        self.lost.update(lost)
        yield made

    def _rows(self, batches: Iterable[pa.RecordBatch], rows: Any) -> Iterator[dict[str, Any]]:
        for batch in self._checked(batches):
            for row in rows(batch):
                self.current = row[self._name]
                yield row

    def _checked(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.seen += batch.num_rows
            refuse_unsound_rows(batch, self.path, self.vocab_size)
            yield batch

    @property
    def _name(self) -> str:
        return "pair_id" if formats.table_of(self.format) == PAIRS.name else "rollout_id"


def _texts(batch: pa.RecordBatch) -> int:
    """Bytes of a batch without its lists of numbers."""
    return sum(column.nbytes for name, column in zip(batch.schema.names, batch.columns, strict=True) if name != "turns")
