"""A process of its own for each statement, which has a real limit of memory and can be ended at any moment.

Invariants: no statement takes this process with it, whatever it allocates; the child ends with its parent, and reads
and writes nothing but what ``run_statement`` does; errors and reports of data arrive here as if they had happened here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING

from gymdata.errors import EXIT_FAULTS, GymdataError, UsageError, reported
from gymdata.query.guard import Limits
from gymdata.store import reading
from gymdata.workers import end_after

if TYPE_CHECKING:
    import pyarrow as pa

#: The program of a child; its arguments are the number of its connection and the import path.
_START = "import sys; sys.path[:] = sys.argv[2:]; from gymdata.query.child import serve; serve()"
#: Bytes of memory that no statement can do without: the libraries and a few buffers. With less they fail to load, or hang.
_LEAST_MEMORY = 512 << 20
#: The same for addresses (``ulimit -v``), of which libraries and threads reserve more than they use.
_LEAST_ADDRESSES = 2 << 30


@dataclass(frozen=True, slots=True)
class Statement:
    """What a child is asked for."""

    sql: str
    paths: tuple[str, ...]
    as_text: bool
    limits: Limits
    allow_changed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A child's report of data that is damaged, or a warning about it."""

    damage: bool
    line: str


#: What a child sends: reports; True when the statement begins, False when it has failed; Arrow streams of one batch each,
#: the first of them without rows; a GymdataError as a dict, another error, or None at the end.
Message = bool | Report | bytes | dict[str, object] | BaseException | None


@contextlib.contextmanager
def run_query(
    sql: str, *paths: str | Path, as_text: bool = False, limits: Limits = Limits()
) -> Iterator[pa.RecordBatchReader]:
    """Like ``query``, but a stream of record batches, for results that need not fit into memory.

    ``as_text``: values of types that JSON and CSV have no form for are DuckDB's text for them. ``limits``: time, until the
    block is left, and memory (default: half of the machine's).
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    allowed = min(machine, _inherited(resource.RLIMIT_AS), _inherited(resource.RLIMIT_DATA))
    limits = replace(limits, memory=min(limits.memory or machine, allowed))
    if limits.memory < _LEAST_MEMORY:
        raise _out_of_memory(limits, f" (SQL takes at least {_LEAST_MEMORY / 1e9:.3g} GB)")
    if (addresses := _inherited(resource.RLIMIT_AS)) < _LEAST_ADDRESSES:
        why = f" (under `ulimit -v` SQL takes at least {_LEAST_ADDRESSES / 1e9:.3g} GB)"
        raise _out_of_memory(replace(limits, memory=addresses), why)
    # Made here, because a child that is ended removes nothing.
    spill = tempfile.TemporaryDirectory(prefix="gymdata-query-")
    limits = replace(limits, spill=spill.name)
    statement = Statement(sql, tuple(map(str, paths)), as_text, limits, reading.current().allow_changed)
    from gymdata.workers.signals import OWN_GROUP

    # A Python of its own: a fork would copy the locks of this process's threads as they are.
    connection, child_end = Pipe()
    with child_end:
        number = child_end.fileno()
        words = [sys.executable, "-c", _START, str(number), *sys.path]
        # Output of libraries must not get into the result.
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(number,), **OWN_GROUP)
    try:
        with contextlib.suppress(OSError):  # dead at once: its first message is missing
            connection.send(statement)
        # While the child starts.
        import pyarrow as pa

        streams = _streams(process, connection, limits)
        schema = next(streams).schema
        batches = (batch for stream in streams for batch in stream)
        with pa.RecordBatchReader.from_batches(schema, batches) as reader:
            yield reader
    finally:
        process.kill()
        process.wait()
        connection.close()
        spill.cleanup()


def _inherited(kind: int) -> int:
    """This process's own limit in bytes."""
    limit = resource.getrlimit(kind)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _streams(
    process: subprocess.Popen[bytes], connection: Connection, limits: Limits
) -> Iterator[pa.RecordBatchReader]:
    """The Arrow streams that a child sends. Raises its error, or that of a child that died or took too long."""
    import pyarrow as pa

    deadline: float | None = None
    while True:
        if deadline is not None and ((left := deadline - time.monotonic()) <= 0 or not connection.poll(left)):
            raise UsageError(f"SQL: took longer than {limits.seconds:g} s", hint="add a LIMIT, or read fewer columns")
        try:
            message: Message = connection.recv()
        except (EOFError, OSError):
            code = process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise _out_of_memory(limits, f" (its process ended with {how})") from None
        match message:
            case None:
                return
            case bool():
                deadline = time.monotonic() + limits.seconds if message and limits.seconds is not None else None
            case Report():
                (reading.report_damage if message.damage else reading.warn)(message.line)
            case bytes():
                yield pa.ipc.open_stream(message)
            case MemoryError():
                raise _out_of_memory(limits)
            case BaseException():
                raise message
            case dict():
                raise reported(message)


def _out_of_memory(limits: Limits, how: str = "") -> GymdataError:
    error = GymdataError(
        f"SQL: out of memory: the statement needs more than its limit of {limits.memory / 1e9:.3g} GB{how}",
        hint="select fewer rows or columns, or aggregate before sorting and listing; the files are not damaged",
    )
    error.exit_code = EXIT_FAULTS
    return error


# -- the child -------------------------------------------------------------------------------------------------------


class _NoPandas:
    """An import hook: Arrow imports pandas if it is there, for a quarter of a second, and nothing here has use for it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> None:  # noqa: ARG004 - its signature
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)


def serve() -> None:
    """Answer one statement: what ``_START`` runs in a process of its own."""
    # The parent ends its child; a signal to the whole group is meant for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection = Connection(int(sys.argv[1]))
    statement: Statement = connection.recv()
    end_after(connection.recv_bytes)
    with contextlib.suppress(BrokenPipeError):
        try:
            # Data of this process, not its address space: libraries and DuckDB's allocator reserve far more than they
            # use.
            resource.setrlimit(resource.RLIMIT_DATA, (statement.limits.memory, statement.limits.memory))
            with contextlib.suppress(OSError):  # Linux: where memory is short, this process is ended before any other
                Path("/proc/self/oom_score_adj").write_text("1000")
            sys.meta_path.insert(0, _NoPandas)
            _send_result(statement, connection)
        except BrokenPipeError:
            raise
        except GymdataError as error:
            connection.send(error.to_dict())
        except (MemoryError, OSError) as error:
            connection.send(error)
        except Exception as error:  # noqa: BLE001 - a defect, which the parent reports
            import traceback

            defect = RuntimeError(f"{type(error).__name__}: {error}")
            defect.add_note("".join(traceback.format_exception(error)))
            connection.send(defect)


def _send_result(statement: Statement, connection: Connection) -> None:
    import pyarrow as pa

    from gymdata.query.statement import run_statement

    def encoded(schema: pa.Schema, *batches: pa.RecordBatch) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return bytes(sink.getvalue())

    with (
        reading.reading(
            statement.allow_changed, lambda line: connection.send(Report(line in reports.damage, line))
        ) as reports,
        run_statement(
            statement.sql, statement.paths, as_text=statement.as_text, limits=statement.limits, clock=connection.send
        ) as reader,
    ):
        connection.send(encoded(reader.schema))
        for batch in reader:
            connection.send(encoded(reader.schema, batch))
    connection.send(None)
