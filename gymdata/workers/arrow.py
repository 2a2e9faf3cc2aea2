"""Arrow tables as bytes, for the results of workers."""

from __future__ import annotations

import pyarrow as pa


def packed(table: pa.Table) -> bytes:
    """A table as an Arrow stream, without what its slices leave out."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def unpacked(data: bytes) -> pa.Table:
    """The same table again, in the memory of ``data``."""
    return pa.ipc.open_stream(data).read_all()
