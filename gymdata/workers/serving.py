"""What our HTTP servers share: checks of requests before they are handled (JSON, within the server's limits), and serving
until a signal comes.

Invariants: a request that is refused is answered with a JSON object that says what was got, what the limit is, and
which flag raises it; a body over the limit is never kept, and a hostile one is refused by its size and its brackets,
before it is parsed; big bodies are parsed in a thread, so that other requests are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import orjson

from gymdata.rollouts.messages import JsonObject
from gymdata.texts import REFUSAL, option, short

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

T = TypeVar("T")
#: A smaller body is parsed sooner than a thread takes it.
_SMALL = 64 * 1024
#: A body over the limit is still read to its end if it is not much longer, so that its sender reads the answer.
_READ_ON = 8
_READ_ON_S = 5.0
_STRING = re.compile(rb'"[^"]*"')
_STEPS = bytes.maketrans(b"[{]}", bytes([1, 1, 255, 255]))
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b'[]{}"')))


class Refused(Exception):  # noqa: N818 - an answer, not a defect
    """A request that is answered with ``status`` and ``body`` without being handled."""

    def __init__(self, status: int, body: JsonObject) -> None:
        body = {**body, "detail": short(str(body["detail"]), REFUSAL)}
        super().__init__(body["detail"])
        self.status, self.body = status, body

    @classmethod
    def over(cls, status: int, kind: str, unit: str, n: int, limit: int, setting: str) -> Refused:
        """More than a limit, which ``setting`` raises; ``unit``: what is counted, in the plural."""
        detail = f"{unit}: got {n:,}, at most {limit:,} (start the server with a higher {option(setting)})"
        return cls(status, {"detail": detail, "kind": kind, "got": n, "limit": limit, "hint": f"{option(setting)} N"})

    def response(self) -> JSONResponse:
        from starlette.responses import JSONResponse

        return JSONResponse(self.body, self.status, {"Connection": "close"} if self.status == 413 else None)


@dataclass(frozen=True, slots=True)
class Bodies:
    """Reads and parses request bodies of so many bytes, levels of nesting, and lists and objects. ``objects_setting``: the
    setting that raises the last, of requests that have ``objects_kind``."""

    max_bytes: int
    max_depth: int
    max_objects: int
    objects_setting: str = "max_body_bytes"
    objects_kind: str = "objects"
    objects_named: str = "lists and objects in a request"
    # A body is parsed while holding the interpreter, so more threads would only hold up the others.
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gymdata-bodies"))

    async def read(self, request: Request) -> bytes:
        """The body. Raises Refused (413, 415)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            # This also keeps web pages from posting here: a browser sends a preflight request before this type.
            detail = f"content-type: got {kind or 'none'!r}, expected application/json"
            raise Refused(415, {"detail": detail, "kind": "content_type"})
        limit = self.max_bytes
        declared = request.headers.get("content-length", "")
        length = int(declared) if declared.isascii() and declared.isdigit() else 0
        if length > _READ_ON * limit:
            raise self._too_long(length)
        chunks: list[bytes] = []
        size = 0
        stream = request.stream()
        async for chunk in stream:
            size += len(chunk)
            if size > limit:
                chunks.clear()
                # To its end, or as long as it is worth.
                left = _READ_ON * limit
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_READ_ON_S):
                        async for rest in stream:
                            left -= len(rest)
                            if left < 0:
                                break
                raise self._too_long(max(size, length))
            chunks.append(chunk)
        return b"".join(chunks)

    async def read_as(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """``read(body)``, for a big body in a thread."""
        if len(body) < _SMALL:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self.threads, read, body)

    def parse(self, body: bytes, *, strict: bool = False) -> Any:
        """The JSON of a body; not ``strict``: also as Python writes it. Raises Refused (422)."""
        depth, objects = shape(body)
        if depth > self.max_depth:
            raise Refused.over(422, "depth", "levels of nesting", depth, self.max_depth, "max_depth")
        if objects > self.max_objects:
            unit, setting = self.objects_named, self.objects_setting
            raise Refused.over(422, self.objects_kind, unit, objects, self.max_objects, setting)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            if strict:
                raise Refused(422, {"detail": f"the body is not JSON: {error}", "kind": "not_json"}) from error
        # Python's own parser takes NaN, numbers of any size and lone surrogates, which clients in Python write.
        try:
            return json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            detail = f"the body is not JSON: {error or type(error).__name__}"
            raise Refused(422, {"detail": detail, "kind": "not_json"}) from error

    def _too_long(self, n_bytes: int) -> Refused:
        return Refused.over(413, "body", "bytes of a request", n_bytes, self.max_bytes, "max_body_bytes")


def shape(body: bytes) -> tuple[int, int]:
    """(levels of nesting, lists and objects) of a JSON text, counted from its brackets outside of strings.

    Time and memory are those of a few passes over the bytes, whatever they hold.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    brackets = _STRING.sub(b"", plain.translate(None, _NO_BRACKETS)).replace(b'"', b"").translate(_STEPS)
    steps = np.frombuffer(brackets, np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0)), int(np.count_nonzero(steps > 0))


def server_of(app: Starlette, stop: Callable[[], Awaitable[None]], *, signals: bool = True) -> uvicorn.Server:
    """A server of ``app``: ``run(sockets=[…])`` serves until a signal, or ``should_exit``, ends it; without ``signals``
    they are the caller's. ``stop`` is awaited before the server waits for connections to close, so that it answers the
    requests that wait."""
    import uvicorn

    # Every request that waits holds a connection; the default limit of 1,024 files is soon reached.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))

    class Server(uvicorn.Server):
        """Answers waiting requests before it waits for connections to close."""

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            await stop()
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with super().capture_signals() if signals else contextlib.nullcontext():
                yield

    # The last: how long a stopped server may keep the address to finish its answers.
    config = uvicorn.Config(
        app, log_level="error", access_log=False, backlog=8192, workers=1, timeout_graceful_shutdown=2
    )
    return Server(config)
