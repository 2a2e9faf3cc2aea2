"""Files of tables while they are written: Parquet with the table's encodings, and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gymdata.rollouts.schema import Table
from gymdata.store.columns import to_rows
from gymdata.store.lines import encode, encode_finite


class ParquetSink:
    """A Parquet file being written: the table's encodings, row groups of limited size, page checksums."""

    #: Most bytes of a row group in memory, unless one row has more. An id has four: it has at most 4 M tokens.
    group_bytes = 16_000_000

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
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        # In pieces so small that a row group is nearly filled.
        if batch.nbytes > self.group_bytes // 8 and batch.num_rows > 1:
            half = batch.num_rows // 2
            self.write(batch.slice(0, half))
            self.write(batch.slice(half))
            return
        if self._bytes + batch.nbytes > self.group_bytes:
            self._flush()
        self._held.append(batch)
        self._bytes += batch.nbytes

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            group = pa.Table.from_batches(self._held)
            self._writer.write_table(group, row_group_size=group.num_rows)
        self._held, self._bytes = [], 0


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
