"""A real S3 server (moto) behind an HTTP proxy that misbehaves on demand: what a client meets on a bad day.

Faults, by the method and the end of the key, for so many requests: ``503`` and ``403`` answer without asking the server;
``lost`` lets the server do what is asked, and closes before the answer; ``cut`` closes in the middle of the answer;
``stop`` calls a function first, for what must happen at just that request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

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
    """``url``: what a client uses. ``asked``: (method, key) of each request that came."""

    server: str
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)

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
        body = await request.read()
        fault = next((one for one in self.faults if one.fits(request.method, request.path)), None)
        kind = ""
        if fault is not None:
            fault.count -= 1
            kind = fault.kind
        if kind == "stop" and fault is not None:
            await asyncio.to_thread(fault.act)
        if kind == "503":
            return web.Response(status=503, text="<Error><Code>SlowDown</Code><Message>slow down</Message></Error>")
        if kind == "403":
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in ("host", "connection"))
        async with (
            ClientSession(auto_decompress=False, cookie_jar=DummyCookieJar()) as session,
            session.request(request.method, f"{self.server}{request.raw_path}", headers=headers, data=body) as got,
        ):
            content = await got.read()
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
        if request.method != "HEAD":
            await response.write(content[: len(content) // 2] if kind == "cut" else content)
        if kind == "cut":
            return self._gone(request)
        await response.write_eof()
        return response

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


_DATE = "Sun, 01 Nov 2026 10:00:00 GMT"


class _Held(NamedTuple):
    body: bytes
    generation: int

    @property
    def tag(self) -> str:
        return f"0x{self.generation:x}"


@dataclass
class Objects:
    """``root``: the path of the bucket on the server. ``azure``: how it speaks, otherwise as Google does."""

    root: str
    azure: bool
    held: dict[str, _Held] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def put(self, key: str, body: bytes) -> None:
        generations = [one.generation for one in self.held.values()]
        self.held[key] = _Held(body, max(generations, default=1_700_000_000_000_000) + 1)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not f"{request.path}/".startswith(self.root):
            return self._no("ContainerNotFound" if self.azure else "NoSuchBucket", 404)
        key = request.path.removeprefix(self.root).strip("/")
        if not key:
            return self._list(request.query.get("prefix", ""))
        if (found := self.held.get(key)) is None:
            return self._no("BlobNotFound" if self.azure else "NoSuchKey", 404)
        if request.headers.get("If-Match") not in (None, f'"{found.tag}"'):
            return self._no("ConditionNotMet", 412)
        return self._got(request, found)

    def _got(self, request: web.Request, found: _Held) -> web.Response:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("x-ms-range", request.headers.get("Range", "")))
        headers = self._headers(found)
        if span is None:
            return web.Response(body=found.body, headers=headers)
        start, end = int(span[1]), min(int(span[2] or len(found.body)) + 1, len(found.body))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(found.body)}"
        return web.Response(status=206, body=found.body[start:end], headers=headers)

    def _headers(self, held: _Held) -> dict[str, str]:
        own = {"x-ms-blob-type": "BlockBlob"} if self.azure else {"x-goog-generation": str(held.generation)}
        return {"ETag": f'"{held.tag}"', "Last-Modified": _DATE, **own}

    def _list(self, prefix: str) -> web.Response:
        found = [(escape(key), one) for key, one in sorted(self.held.items()) if key.startswith(prefix)]
        if self.azure:
            blobs = "".join(
                f"<Blob><Name>{key}</Name><Properties><Last-Modified>{_DATE}</Last-Modified><Etag>{one.tag}</Etag>"
                f"<Content-Length>{len(one.body)}</Content-Length><Content-Type>-</Content-Type></Properties></Blob>"
                for key, one in found
            )
            text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        else:
            text = "".join(
                f"<Contents><Key>{key}</Key><Size>{len(one.body)}</Size><ETag>&quot;{one.tag}&quot;</ETag>"
                f"<LastModified>2026-11-01T10:00:00.000Z</LastModified></Contents>"
                for key, one in found
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>"
        return web.Response(text=text, content_type="application/xml")

    def _no(self, code: str, status: int) -> web.Response:
        text = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
        return web.Response(status=status, text=text, content_type="application/xml")


@contextlib.contextmanager
def objects(azure: bool) -> Iterator[tuple[Objects, str]]:
    """A server with an empty bucket ``bucket``, and its URL."""
    made = Objects("/account/bucket" if azure else "/bucket", azure)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", made.answer)
    with serving(app) as url:
        yield made, f"{url}/account" if azure else url
