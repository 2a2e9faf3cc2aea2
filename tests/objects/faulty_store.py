"""A real S3 server (moto) behind an HTTP proxy that misbehaves on demand: what a client meets on a bad day.

Faults, by the method and the end of the key, for so many requests: ``503`` and ``403`` answer without asking the server;
``hang`` answers nothing until the client gives up; ``truncated`` sends the server half of an upload, and closes;
``lost`` lets the server do what is asked, and closes before the answer; ``cut`` closes in the middle of the answer;
``stop`` and ``stop after`` call a function before or after the server did it, for what must happen at just that request:
when it returns True before, the server is not asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from aiohttp import ClientSession, DummyCookieJar, web
from multidict import CIMultiDict

from tests.servers import serving


@dataclass
class Fault:
    kind: str
    method: str
    key: str
    count: int = 1
    act: Callable[[], object] = lambda: None

    def fits(self, method: str, path: str) -> bool:
        return self.count > 0 and self.method == method and re.search(self.key, path) is not None


@dataclass
class FaultyStore:
    """``url``: what a client uses. ``asked``: (method, key) of each request that came. ``served``: (key, bytes) of each
    answer to a GET. ``look``: called at each request, before it is answered."""

    server: str
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    served: list[tuple[str, int]] = field(default_factory=list)
    look: Callable[[], object] = lambda: None

    def fail(self, kind: str, method: str, key: str, count: int = 1, act: Callable[[], object] = lambda: None) -> None:
        """From now on the next ``count`` requests of ``method`` whose path matches ``key`` (a regular expression) fail."""
        self.faults.append(Fault(kind, method, key, count, act))

    def count(self, method: str, key: str = "") -> int:
        return sum(m == method and re.search(key, path) is not None for m, path in self.asked)

    def put(self, key: str, body: bytes) -> None:
        """Write an object, past all faults."""
        self._ask("PUT", key, body)

    def get(self, key: str) -> bytes:
        return self._ask("GET", key)

    def delete(self, key: str) -> None:
        self._ask("DELETE", key)

    def names(self, bucket: str = "bucket") -> list[str]:
        return [
            unquote(key) for key in re.findall(r"<Key>(.*?)</Key>", self._ask("GET", f"{bucket}?list-type=2").decode())
        ]

    def _ask(self, method: str, key: str, body: bytes | None = None) -> bytes:
        # The server lets in whoever has a key, and checks none.
        signed = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        headers = {"Content-Type": "application/octet-stream", "Authorization": signed}
        with urlopen(Request(f"{self.server}/{key}", body, headers, method=method), timeout=20) as answer:
            return bytes(answer.read())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        self.look()
        body = await request.read()
        fault = next((one for one in self.faults if one.fits(request.method, request.path)), None)
        kind = ""
        if fault is not None:
            fault.count -= 1
            kind = fault.kind
        if kind == "stop" and fault is not None and await asyncio.to_thread(fault.act):
            return self._gone(request)
        if kind == "503":
            return web.Response(status=503, text="<Error><Code>SlowDown</Code><Message>slow down</Message></Error>")
        if kind == "403":
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
        if kind == "hang":
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
            return web.Response(status=500)
        if kind == "truncated":
            await self._half(request, body)
            return self._gone(request)
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in ("host", "connection"))
        async with (
            ClientSession(auto_decompress=False, cookie_jar=DummyCookieJar()) as session,
            session.request(request.method, f"{self.server}{request.raw_path}", headers=headers, data=body) as got,
        ):
            content = await got.read()
        if kind == "stop after" and fault is not None:
            await asyncio.to_thread(fault.act)
        if kind == "lost":
            return self._gone(request)
        passed = {
            k: v
            for k, v in got.headers.items()
            if k.lower() not in ("transfer-encoding", "connection", "content-length")
        }
        response = web.StreamResponse(status=got.status, headers=passed)
        response.content_length = int(got.headers.get("Content-Length", len(content)))
        await response.prepare(request)
        if request.method == "GET":
            self.served.append((request.path, len(content)))
        if request.method != "HEAD":
            await response.write(content[: len(content) // 2] if kind == "cut" else content)
        if kind == "cut":
            return self._gone(request)
        await response.write_eof()
        return response

    async def _half(self, request: web.Request, body: bytes) -> None:
        """What a server gets of an upload whose connection is lost."""
        at = urlsplit(self.server)
        _, writer = await asyncio.open_connection(at.hostname, at.port)
        lines = [f"{request.method} {request.raw_path} HTTP/1.1", f"Host: {at.netloc}", f"Content-Length: {len(body)}"]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body[: len(body) // 2])
        await writer.drain()
        writer.close()

    def _gone(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """The base URL of an S3 server on a free port, in this process, with an empty bucket ``bucket``."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def faulty(server: str) -> Iterator[FaultyStore]:
    store = FaultyStore(server)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{key:.*}", store.answer)
    with serving(app) as url:
        store.url = url
        yield store
