"""Files of tables while they are written: Parquet with the table's encodings, and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gymdata.rollouts.schema import Table
from gymdata.store.columns import to_rows
from gymdata.store.lines import encode, encode_finite


class ParquetSink:
    """A Parquet file being written: the table's encodings, row groups of limited size, page checksums."""

    #: Largest row group: its tokens, its bytes in memory, and those of rows without tokens, which only bytes can bound.
    group_tokens = 4_000_000
    group_bytes = 128 << 20
    text_group_bytes = 8 << 20

    def __init__(self, path: Path, table: Table, schema: pa.Schema) -> None:
        leaves = _leaves(schema)
        # Token ids repeat over long distances, so they gain by a higher level; floats gain nothing.
        levels = {leaf: table.float_level if pa.types.is_float32(kind) else 1 for leaf, kind in leaves.items()}
        levels |= {leaf: table.id_level for leaf in leaves if leaf.endswith("_ids.list.element")}
        self._writer = pq.ParquetWriter(
            path.absolute(),  # pyarrow takes a relative name with a colon for a URL
            schema.with_metadata(table.metadata),
            compression="zstd",
            compression_level=levels,
            data_page_size=table.page_bytes,
            use_dictionary=[c for c in table.dictionary if c in leaves],
            use_byte_stream_split=[c for c in table.split if c in leaves],
            write_statistics=[c for c in leaves if "." not in c],
            write_page_checksum=True,
        )
        self._held: list[pa.RecordBatch] = []
        self._tokens = self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        tokens = tokens_of(batch)
        # Rows without tokens, or with long texts, would make row groups of any size.
        most = self.group_bytes if self._tokens or tokens.any() else self.text_group_bytes
        rows = max(1, batch.num_rows * most // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if self._held and self._bytes + piece.nbytes > most:
                self._flush()
            self._add(piece, tokens[start : start + rows])

    def _add(self, batch: pa.RecordBatch, tokens: np.ndarray) -> None:
        sizes = np.cumsum(tokens)
        start, before = 0, 0
        while start < batch.num_rows:
            room = before + self.group_tokens - self._tokens
            stop = int(np.searchsorted(sizes, room, side="right"))
            if stop <= start and self._held:
                self._flush()
                continue
            stop = max(stop, start + 1)
            self._held.append(batch.slice(start, stop - start))
            self._bytes += self._held[-1].nbytes
            self._tokens += int(sizes[stop - 1]) - before
            start, before = stop, int(sizes[stop - 1])

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            group = pa.Table.from_batches(self._held)
            self._writer.write_table(group, row_group_size=group.num_rows)
        self._held, self._tokens, self._bytes = [], 0, 0


class JsonLinesSink:
    """A JSON lines file being written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, batch: pa.RecordBatch) -> None:
        # Whether all numbers are finite is known by column at once; of a row it takes a third of the time of writing it.
        to_line = encode_finite if all(map(_is_finite, batch.columns)) else encode
        for start in range(0, batch.num_rows, 1024):
            self._file.writelines(to_line(row) + b"\n" for row in to_rows(batch.slice(start, 1024)))

    def close(self) -> None:
        self._file.close()


def _is_finite(array: pa.Array) -> bool:
    """Whether no number in ``array`` is NaN or infinite."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _is_finite(array.flatten())
    if pa.types.is_struct(array.type):
        return all(map(_is_finite, array.flatten()))
    return not pa.types.is_floating(array.type) or pc.all(pc.is_finite(array), min_count=0).as_py()


def tokens_of(batch: pa.RecordBatch) -> np.ndarray:
    """Tokens in each row, int64: from the counts if the table has them, else the lengths of its id lists, else of its
    longest lists of numbers."""
    names = batch.schema.names
    if "n_context_tokens" in names:
        total = np.zeros(batch.num_rows, np.int64)
        for name in ("n_context_tokens", "n_generated_tokens"):
            total += batch.column(name).to_numpy(zero_copy_only=False)
        return total
    lists = {n: c for n, c in zip(names, batch.columns, strict=True) if pa.types.is_list(c.type)}
    total, longest = np.zeros(batch.num_rows, np.int64), np.zeros(batch.num_rows, np.int64)
    for name, column in lists.items():
        sizes = np.diff(column.offsets.to_numpy())
        if name.endswith("_ids"):
            total += sizes
        elif pa.types.is_floating(column.type.value_type):
            longest = np.maximum(longest, sizes)
    return total if any(name.endswith("_ids") for name in lists) else longest


def _leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Parquet column paths of a schema, and their types."""

    def walk(kind: pa.DataType, path: str) -> Iterator[tuple[str, pa.DataType]]:
        if pa.types.is_list(kind):
            yield from walk(kind.value_type, path + ".list.element")
        elif pa.types.is_struct(kind):
            for f in kind:
                yield from walk(f.type, f"{path}.{f.name}")
        else:
            yield path, kind

    return {leaf: kind for f in schema for leaf, kind in walk(f.type, f.name)}
