"""Reading rollouts from Parquet for validation: only the leaves that checks read, ahead of the checks, in row order.

Invariants: rows come in file order; at most a few row groups are in memory, and a file with one giant row group
is streamed; what cannot be read is a violation that names the file, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.checks.violations import Violation
from gymdata.errors import DataError, first_line
from gymdata.rollouts import schema
from gymdata.rollouts.ragged import Ragged, list_parts
from gymdata.rollouts.turn_columns import Evidence, from_arrow
from gymdata.store.parquet import parquet_file
from gymdata.workers.tuning import ahead

_SCALARS = ("rollout_id", "group_id", "reward", "temperature", "n_turns", "n_context_tokens", "n_generated_tokens")
#: Read if present: behavior is not a fault of the file.
_WHERE_THERE = ("tools", "started_at", "extra")
_NESTED = {
    "rewards": ("name", "value"),
    "messages": ("role", "turn", "tool_calls", "tool_call_id", "content", "reasoning"),
    "turns": (
        *("parent", "prefix_length", "prompt_delta_ids", "generation_token_ids", "generation_log_probs", "digest"),
        *("agent", "finish_reason", "rendered", "weight_versions"),
    ),
}
_TEXTS = ("content", "reasoning")
_REQUIRED_TURN = frozenset(_NESTED["turns"]) - {"agent", "finish_reason", "rendered", "weight_versions"}
#: Uncompressed bytes of a row group above which it is streamed instead of read at once.
_GIANT = 256 << 20
_STREAM_BYTES = 48 << 20
_CHECKED_BYTES = 8 << 20


def columns_read(file: pq.ParquetFile, texts: bool = True) -> list[str]:
    """The Parquet leaf paths that validation reads of ``file``: for benchmarks, what another tool has to read as well.
    ``texts``: with those of messages, which only checks of behavior need."""
    paths = []
    for i in range(len(file.schema)):
        path = file.schema.column(i).path.split(".")
        if not texts and path[0] == "messages" and path[-1] in _TEXTS:
            continue
        if path == ["extra"] and not _lacks_rewards(file):
            continue
        if (len(path) == 1 and path[0] in (*_SCALARS, *_WHERE_THERE)) or (
            len(path) > 3 and path[3] in _NESTED.get(path[0], ())
        ):
            paths.append(".".join(path))
    return paths


def _lacks_rewards(file: pq.ParquetFile) -> bool:
    """Whether a reward is missing, so that ``extra`` may say why."""
    groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    of_reward = (column.statistics for column in columns if column.path_in_schema == "reward")
    return any(statistics is None or statistics.null_count for statistics in of_reward)


def scan(path: Path, texts: bool = True) -> Iterator[Evidence | Violation]:
    """The batches of one Parquet file, and violations for what is wrong with the file as a whole. ``texts``: as in
    ``columns_read``."""
    try:
        file = parquet_file(path, memory_map=False, pre_buffer=True)
    except (pa.ArrowException, OSError) as error:
        yield Violation("S101", 0, detail=f"the file cannot be read: {first_line(error)}")
        return
    with file:
        problems, usable = _file_problems(file)
        yield from problems
        if not usable:
            return
        row = 0
        try:
            read = _read_ahead(file, path, columns_read(file, texts))
            # In slices, so that what is computed of one is small compared to a row group.
            steps = ((batch, max(1, len(batch) * _CHECKED_BYTES // max(batch.nbytes, 1))) for batch in read)
            for batch in (group.slice(start, step) for group, step in steps for start in range(0, len(group), step)):
                try:
                    yield from _evidence(_typed(batch), row)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                    yield Violation("S102", row, detail=f"rows {row} to {row + len(batch) - 1}: {first_line(error)}")
                row += len(batch)
        except (pa.ArrowException, OSError) as error:
            yield Violation("S101", row, detail=f"the file cannot be read from row {row} on: {first_line(error)}")


def _file_problems(file: pq.ParquetFile) -> tuple[list[Violation], bool]:
    try:
        schema.check_version(file.schema_arrow.metadata, "file", schema.ROLLOUTS)
    except DataError as error:
        return [Violation(error.code or "S102", 0, detail=error.message)], False
    names = file.schema_arrow.names
    missing = [c for c in schema.ROLLOUTS.required() if c not in names]
    lacks = [Violation("S103", 0, expected=c, detail=f"column {c!r} is missing") for c in missing]
    if "turns" not in names:
        return lacks, False
    kind = file.schema_arrow.field("turns").type
    if not ((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)):
        return [*lacks, Violation("S102", 0, expected="list<struct>", got=str(kind), detail="column 'turns'")], False
    inner = {f.name for f in kind.value_type}
    lost = sorted(_REQUIRED_TURN - inner)
    lacks += [Violation("S103", 0, expected=c, detail=f"field {c!r} of turns is missing") for c in lost]
    return lacks, not lost


def _evidence(batch: pa.RecordBatch, first_row: int) -> Iterator[Evidence | Violation]:
    """The rows of ``batch`` that can be checked, and an S102 for each that has a null where a check needs a value."""
    bad: dict[int, Violation] = {}
    for index, turn, name, position in _nulls(batch):
        if index not in bad:
            rollout_id = batch.column("rollout_id")[index].as_py() if "rollout_id" in batch.schema.names else None
            bad[index] = Violation(
                "S102", first_row + index, rollout_id, turn, position, expected="a value", got="null", detail=name
            )
    if not bad:
        yield from_arrow(batch, first_row)
        return
    yield from (bad[index] for index in sorted(bad))
    sound = np.setdiff1d(np.arange(len(batch)), np.fromiter(bad, np.int64, len(bad)))
    evidence = from_arrow(batch.take(pa.array(sound)), first_row)
    evidence.rows = first_row + sound
    yield evidence


def _nulls(batch: pa.RecordBatch) -> Iterator[tuple[int, int | None, str, int | None]]:
    """(row of the batch, turn, field, position) of nulls that no array of numbers can hold.

    A whole list that is null is left to T205 and L301, and a null log-probability to L302.
    """
    if "rollout_id" in batch.schema.names:
        for index in np.flatnonzero(batch.column("rollout_id").is_null()):
            yield int(index), None, "rollout_id", None
    offsets, struct = list_parts(batch.column("turns"))
    turns = Ragged(np.arange(len(struct)), offsets)

    def where_null(values: pa.Array) -> Any:
        return np.flatnonzero(values.is_null()) if values.null_count else ()

    for k in where_null(struct):
        yield *turns.locate(k), "a turn", None
    for name in ("parent", "prefix_length", "digest"):
        for k in where_null(struct.field(name)):
            yield *turns.locate(k), name, None
    for name in ("prompt_delta_ids", "generation_token_ids"):
        offsets, values = list_parts(struct.field(name))
        lists = Ragged(values, offsets)
        for i in where_null(values):
            k, position = lists.locate(i)
            yield *turns.locate(k), name, position


def _read_ahead(file: pq.ParquetFile, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    giant = any(g.total_byte_size > _GIANT for g in groups)
    if giant:
        rows = max(g.num_rows / max(g.total_byte_size, 1) for g in groups) * _STREAM_BYTES
        yield from ahead(file.iter_batches(max(1, int(rows)), columns=columns), 1)
        return
    metadata = file.metadata

    def read(index: int) -> pa.Table:
        # One ParquetFile is not for two threads; opening with known metadata costs nothing.
        with parquet_file(path, metadata=metadata) as reopened:
            return reopened.read_row_group(index, columns=columns, use_threads=False)

    for table in ahead((read(index) for index, group in enumerate(groups) if group.num_rows), 1):
        yield from table.to_batches()


def _typed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` with the types of the rollouts table, cast only where they differ. Raises ArrowInvalid on loss."""

    def plain(kind: pa.DataType) -> pa.DataType:
        return pa.list_(plain(kind.value_type)) if pa.types.is_list(kind) else kind

    arrays, fields = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        kind = schema.ROLLOUTS.schema.field(field.name).type
        if field.name in _NESTED:
            expected, actual = {f.name: f for f in kind.value_type}, field.type.value_type
            # Names and order as in the file, and nullable as in the file: only types are brought into line.
            struct = pa.struct([pa.field(f.name, expected[f.name].type, f.nullable) for f in actual])
            same = all(plain(a.type).equals(plain(b.type)) for a, b in zip(struct, actual, strict=True))
            kind = field.type if same and pa.types.is_list(field.type) else pa.list_(struct)
        arrays.append(array if field.type.equals(kind) else array.cast(kind))
        fields.append(pa.field(field.name, kind))
    return pa.record_batch(arrays, schema=pa.schema(fields))
