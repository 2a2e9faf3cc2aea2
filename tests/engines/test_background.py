"""Which server of ``gymdata serve --background`` samples a model, on files of servers that this test answers for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from gymdata.engines.servers.background import BackgroundServer, background_server, background_servers
from gymdata.store.run_json import write_json
from tests.servers import serving

DECIDING = ("dtype", "max_model_len")
Server = Callable[..., BackgroundServer]


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


@pytest.fixture
def url() -> Iterator[str]:
    app = web.Application()
    app.router.add_get("/health", healthy)
    with serving(app) as url:
        yield url


@pytest.fixture
def server(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackgroundServer:
    """A server of the folder ``model`` with the weights ``abc`` in float32, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    started = psutil.Process().create_time()
    engine = {"dtype": "float32", "max_num_seqs": 8}
    log = str(tmp_path / "log")
    described = BackgroundServer(url, "model", str(tmp_path / "model"), "abc", engine, os.getpid(), started, log)
    described.save()
    return described


@pytest.mark.parametrize(
    ("folder", "weights", "engine"),
    [
        ("model", "abc", {"dtype": "float32"}),
        ("model", "abc", {"dtype": "float32", "max_num_seqs": 8}),
        ("copy", "abc", {"dtype": "float32"}),
    ],
)
def test_the_same_weights_and_arguments_are_sampled_from_it(
    server: BackgroundServer, tmp_path: Path, folder: str, weights: str, engine: dict[str, object]
) -> None:
    """Under every name of the folder; what only the server was given and decides no token is free."""
    chosen, notes = background_server(str(tmp_path / folder), weights, engine, DECIDING)
    assert chosen == server
    assert notes == [f"sampling from {server.url}, which `gymdata serve --background` started"]


@pytest.mark.parametrize(
    ("weights", "engine", "why"),
    [
        ("abc", {}, "its engine.dtype is float32, here not set"),
        ("abc", {"dtype": "bfloat16"}, "its engine.dtype is float32, here bfloat16"),
        ("abc", {"dtype": "float32", "max_num_seqs": 4}, "its engine.max_num_seqs is 8, here 4"),
        ("abc", {"dtype": "float32", "max_model_len": 64}, "its engine.max_model_len is not set, here 64"),
        ("xyz", {"dtype": "float32"}, "it has the weights that the folder had when it was started"),
    ],
)
def test_a_server_that_differs_is_not_used_and_one_line_says_why(
    server: BackgroundServer, tmp_path: Path, weights: str, engine: dict[str, object], why: str
) -> None:
    """The engine is then in the command's own process."""
    chosen, notes = background_server(str(tmp_path / "model"), weights, engine, DECIDING)
    assert (chosen, notes) == (None, [f"not sampling from the background server on {server.url}: {why}"])


def test_a_server_of_another_model_is_not_mentioned(server: BackgroundServer) -> None:
    """Neither its folder nor its weights are those of the model."""
    assert server.is_alive()
    assert background_server("another", "xyz", {"dtype": "float32"}, DECIDING) == (None, [])


@pytest.mark.parametrize(
    "damage",
    [{"started": 1.0}, {"pid": "x"}, {"pid": -1}, {"started": None}, {"engine": None}, {"url": None}, {"model": 1}],
)
def test_a_file_that_describes_no_server_is_ignored(server: BackgroundServer, damage: dict[str, object]) -> None:
    """Another process has the number now, or the file is damaged: what a command cannot use is no fault of the command."""
    write_json(server.file, asdict(server) | damage)
    server.file.with_stem(f"{server.file.stem}0").write_text("{")
    assert background_servers() == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "rubbish", "http://a b", "http://127.0.0.1:99999"])
def test_a_server_that_does_not_answer_is_not_used(server: BackgroundServer, tmp_path: Path, url: str) -> None:
    """It may be starting still, its engine died, or its address is damaged."""
    replace(server, url=url).save()
    chosen, notes = background_server(str(tmp_path / "model"), "abc", {"dtype": "float32"}, DECIDING)
    assert (chosen, notes) == (None, [f"not sampling from the background server on {url}: it does not answer"])
