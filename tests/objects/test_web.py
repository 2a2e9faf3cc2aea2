"""A file behind http:// or https:// is fetched like one of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

import gymdata
from gymdata.cli.main import main
from gymdata.store import read_run_json
from gymdata.store.fetch import fetched
from tests.objects.conftest import ROWS
from tests.servers import serving


class Web:
    """Serves ``body`` at /data/part.parquet to whoever has the key. ``cut``: half of it, and then nothing."""

    def __init__(self, body: bytes) -> None:
        self.body, self.tag, self.cut, self.url = body, '"1"', False, ""
        self.statuses: list[int] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = await self._answer(request)
        self.statuses.append(response.status)
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("key") != "hidden-secret":
            return web.Response(status=403)
        if request.path != "/data/part.parquet":
            return web.Response(status=404)
        if self.tag and request.headers.get("If-None-Match") == self.tag:
            return web.Response(status=304)
        headers = {"ETag": self.tag} if self.tag else {}
        if not self.cut:
            return web.Response(body=self.body, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Length": str(len(self.body))})
        await response.prepare(request)
        await response.write(self.body[: len(self.body) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response


@pytest.fixture
def server(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Web((run / "rollouts/part-00000.parquet").read_bytes())
    app = web.Application()
    app.router.add_get("/{path:.*}", made.answer)
    with serving(app) as url:
        made.url = f"{url}/data/part.parquet?key=hidden-secret"
        yield made


def test_a_file_is_fetched_once_as_long_as_its_tag_stays(server: Web) -> None:
    """The cached copy is read while the server says that it is the same; without a tag the file is fetched each time."""
    assert gymdata.load_rollouts(server.url).num_rows == len(ROWS)
    assert gymdata.load_rollouts(server.url).num_rows == len(ROWS)
    server.body, server.tag = b"other", '"2"'
    assert fetched(server.url).read_bytes() == b"other"
    server.body, server.tag = b"third", ""
    assert fetched(server.url).read_bytes() == b"third"
    server.body = b"again"
    assert fetched(Path(server.url)).read_bytes() == b"again"
    assert server.statuses == [200, 304, 200, 200, 200]


def test_a_secret_in_the_query_is_in_no_file_and_no_message(
    server: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """run.json names the file by its URL without the query; the cache has it only as a hash."""
    assert main(["pairs", server.url, "-o", str(tmp_path / "pairs")]) == 0
    shown = server.url.partition("?")[0]
    assert [one["path"] for one in read_run_json(tmp_path / "pairs")["parents"]] == [shown]
    assert main(["validate", f"{server.url}-wrong"]) == 3
    assert main(["validate", server.url.replace("part.", "none.")]) == 2
    server.cut, server.tag = True, '"2"'
    assert main(["validate", server.url]) == 3
    said = capsys.readouterr()
    assert f"server: {shown}?key=***" in said.err
    assert "download the file with its credentials" in said.err
    assert "none.parquet?key=***: no such file" in said.err
    assert "hidden-secret" not in said.out + said.err
    for file in tmp_path.rglob("*"):
        assert "hidden-secret" not in str(file)
        assert not file.is_file() or b"hidden-secret" not in file.read_bytes(), file


def test_an_interrupted_download_is_no_copy(server: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the file is not read, and nothing is left of it; the same command then fetches the whole."""
    server.cut = True
    assert main(["validate", server.url]) == 3
    assert "server: http://127.0.0.1" in capsys.readouterr().err
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    server.cut = False
    assert main(["validate", server.url]) == 0
