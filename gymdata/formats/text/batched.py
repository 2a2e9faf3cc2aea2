"""Text formats of other trainers: a batch of rows is converted at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gymdata.formats import Format
from gymdata.formats.conversion.importing import ODD

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.stage_output import Part

#: Bytes of rows that are converted at once.
_TEXT_BYTES = 8 << 20
COLUMNS = ("rollout_id", "reward", "rewards", "n_turns", "n_breaks", "messages", "tools", "turns")


class TextFormat(Format):
    """A format of which ``batch`` converts many rows at a time."""

    suffixes = (".jsonl",)
    columns: ClassVar[Sequence[str] | None] = COLUMNS
    #: No text format uses them. They are not read from Parquet: even an empty one takes time.
    unread: ClassVar[tuple[str, ...]] = ("turns.finish_reason", "turns.top_log_probs")

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Any:
        """The rows of a batch, as ``save`` takes them: by default ``chat_text.Lines``."""
        raise NotImplementedError

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[Any]:
        for batch in batches:
            # Smaller batches of rows with long texts, to bound memory.
            texts = sum(c.nbytes for name, c in zip(batch.schema.names, batch.columns, strict=True) if name != "turns")
            size = max(1, batch.num_rows * _TEXT_BYTES // max(1, texts))
            for start in range(0, batch.num_rows, size):
                yield from self._converted(batch.slice(start, size), export)

    def _converted(self, batch: pa.RecordBatch, export: Export) -> Iterator[Any]:
        """When a row cannot be converted, each row is converted alone, to name that row."""
        lost: Counter[str] = Counter()
        try:
            converted = self.batch(batch, lost)
        except ODD:
            if batch.num_rows == 1:
                export.current = batch.column(export.key)[0].as_py()
                raise
            for row in range(batch.num_rows):
                yield from self._converted(batch.slice(row, 1), export)
            return
        export.lost.update(lost)
        yield converted

    def save(self, converted: Iterable[Any], part: Part, export: Export) -> None:
        import xxhash

        digest = xxhash.xxh3_64()
        with part.path.open("wb") as file:
            for lines in converted:
                file.write(lines.text)
                digest.update(lines.text)
                export.written += lines.rows
        part.xxh3 = digest.hexdigest()
        export.carry_all(self.carries)
