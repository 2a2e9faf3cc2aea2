"""Servers that speak as Google Cloud Storage (its XML API) and Azure Blob Storage do: fakes at the port.

What differs from S3, and is shown here: Google's conditional writes compare the generation of an object, and refuse its
ETag; Azure lists ETags without the quotes that its headers have, and names a missing container in its own way.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.servers import serving

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
    writes: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        if not f"{request.path}/".startswith(self.root):
            return self._no("ContainerNotFound" if self.azure else "NoSuchBucket", 404)
        key = request.path.removeprefix(self.root).strip("/")
        if request.query.get("comp") == "batch":
            return self._delete_all((await request.read()).decode())
        if not key:
            return self._list(request.query.get("prefix", ""))
        if request.method == "PUT":
            return self._put(key, request, await request.read())
        if (found := self.held.get(key)) is None:
            return self._no("BlobNotFound" if self.azure else "NoSuchKey", 404)
        if request.headers.get("If-Match") not in (None, f'"{found.tag}"'):
            return self._no("ConditionNotMet", 412)
        if request.method == "DELETE":
            del self.held[key]
            return web.Response(status=202 if self.azure else 204)
        return self._got(request, found)

    def _got(self, request: web.Request, found: _Held) -> web.Response:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("x-ms-range", request.headers.get("Range", "")))
        headers = self._headers(found)
        if span is None:
            return web.Response(body=found.body, headers=headers)
        start, end = int(span[1]), min(int(span[2] or len(found.body)) + 1, len(found.body))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(found.body)}"
        return web.Response(status=206, body=found.body[start:end], headers=headers)

    def _put(self, key: str, request: web.Request, body: bytes) -> web.Response:
        found, given = self.held.get(key), request.headers
        if self.azure:
            if given.get("If-None-Match") == "*" and found is not None:
                return self._no("BlobAlreadyExists", 409)
            refused = "If-Match" in given and (found is None or given["If-Match"] != f'"{found.tag}"')
        else:
            assert "If-Match" not in given, "Google's XML API has no conditional write by ETag"
            wanted = given.get("x-goog-if-generation-match")
            refused = wanted is not None and int(wanted) != (found.generation if found is not None else 0)
        if refused:
            return self._no("ConditionNotMet", 412)
        self.writes += 1
        self.held[key] = _Held(body, 1_700_000_000_000_000 + self.writes)
        return web.Response(status=201 if self.azure else 200, headers=self._headers(self.held[key]))

    def _delete_all(self, body: str) -> web.Response:
        """A batch of Azure: one HTTP request in each part, and one answer to each."""
        parts = []
        for number, key in enumerate(re.findall(rf"DELETE {self.root}/(\S+) HTTP", body)):
            known = self.held.pop(unquote(key), None) is not None
            status = "202 Accepted" if known else "404 The specified blob does not exist."
            parts.append(
                "--batch\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
                f"Content-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\nx-ms-request-id: {number}\r\n"
                + ("" if known else "x-ms-error-code: BlobNotFound\r\n")
                + "\r\n"
            )
        headers = {"Content-Type": "multipart/mixed; boundary=batch"}
        return web.Response(status=202, body="".join([*parts, "--batch--"]).encode(), headers=headers)

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
