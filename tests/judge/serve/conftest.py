"""A judge that misbehaves on demand, and compare servers as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest

from gymdata.cli.main import main
from tests.forks import Fork, Forks, forks
from tests.judge_server import Behaviour, judge_server


@dataclass
class Server:
    """A running ``gymdata serve-genrm``."""

    url: str
    process: Fork
    #: What it wrote before it served, and where it goes on to write.
    said: str
    log: IO[str]

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """(status, JSON)."""
        return send(self.url + path, body)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path) as answer:
            return answer.read().decode()

    def figure(self, name: str) -> float:
        """One figure of /metrics; 0 when it is not there."""
        found = re.search(rf"^gymdata_genrm_{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def stop(self) -> int:
        """End it as a service manager does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def send(url: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture
def judge() -> Iterator[tuple[Behaviour, str]]:
    """A judge's behaviour, and its URL."""
    behaviour = Behaviour()
    with judge_server(behaviour) as url:
        yield behaviour, url


#: What a server imports.
_LOADED = ["gymdata.cli.main", "gymdata.commands.judge.serve.run", "gymdata.http", "polars", "pyarrow.dataset"]
_LOADED += ["fastapi", "uvicorn"]
_LOADED += ["uvicorn.lifespan.on", "uvicorn.protocols.http.httptools_impl", "websockets.server"]


@pytest.fixture(scope="session")
def processes() -> Iterator[Forks]:
    with forks(*_LOADED) as made:
        yield made


def _serve(words: list[str], err: str, cwd: Path | None) -> int:
    os.dup2(os.open(err, os.O_WRONLY), 2)
    os.chdir(cwd or ".")
    return main(words)


def start(
    processes: Forks,
    judge_url: str,
    folder: Path | None,
    *flags: str,
    said: Path,
    cwd: Path | None = None,
) -> Server:
    """``said``: a new file for what the server writes."""
    words = ["serve-genrm", "--endpoint", judge_url, "-m", "judge", "--port", "0"]
    words += ["--genrm-parse-retry-sleep-s", "0", "--set", "retry_pause=0", *flags]
    words += ["-o", str(folder)] if folder is not None else []
    os.mkfifo(said)
    process = processes.start(_serve, words, str(said), cwd)
    written = ""
    log = said.open()
    said.unlink()
    # To the line that says where, or to the end: a server that ended has closed the pipe.
    for line in log:
        written += line
        if found := re.search(r"serving on (http://\S+?),", line):
            server = Server(found[1], process, written, log)
            _await(server)
            return server
    pytest.fail(f"the server did not start: {written}")


def _await(server: Server) -> None:
    """The socket is bound before the application listens, so the first request just waits its turn."""
    for _ in range(200):
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.get("/health")
            return
        select.select([], [], [], 0.05)
    pytest.fail("the server does not answer")


@pytest.fixture
def serve(judge: tuple[Behaviour, str], processes: Forks, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server on the judge: ``serve(*flags, folder=…)``."""
    started: list[Server] = []

    def run(*flags: str, folder: Path | None = None, kept: bool = True) -> Server:
        place = (folder or tmp_path / "online") if kept else None
        said = tmp_path / f"said-{len(started)}"
        started.append(start(processes, judge[1], place, *flags, said=said, cwd=tmp_path))
        return started[-1]

    yield run
    for server in started:
        server.kill()
        server.log.close()


@contextlib.contextmanager
def one_server(processes: Forks, folder: Path, *flags: str) -> Iterator[tuple[Behaviour, Server]]:
    """A judge's behaviour and a server on it, for tests that share them: each has texts of its own."""
    behaviour = Behaviour()
    with judge_server(behaviour) as url:
        server = start(processes, url, folder / "online", *flags, said=folder / "said")
        yield behaviour, server
        server.kill()
        server.log.close()


QUESTION = [{"role": "user", "content": "How much is 1+1?"}]


def response(text: str, reasoning: str = "") -> dict[str, Any]:
    thought = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]}] if reasoning else []
    return {"output": [*thought, {"type": "message", "content": [{"type": "output_text", "text": text}]}]}


def compare(server: Server, *texts: str, **more: Any) -> tuple[int, Any]:
    body = {"conversation_history": QUESTION, "response_objs": [response(t) for t in texts], **more}
    return server.post("/compare", body)


def say(one: float, two: float, ranking: float) -> str:
    return json.dumps({"score_1": one, "score_2": two, "ranking": ranking})


def verify_body(text: str, prompt: str = "q", **ids: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": prompt}]}
    return {"responses_create_params": params, "response": response(text), **ids}


async def post_all(url: str, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(body: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(url, json=body) as answer:
                return answer.status, await answer.json()

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def verify_all(server: Server, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    """Send all at once, each on its own connection."""
    return asyncio.run(post_all(server.url + "/verify", bodies))


async def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the server is there. Raises TimeoutError if it never is: a lost request fails the test, and hangs none."""
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(reached):
            await asyncio.sleep(0.01)


def members_waiting(server: Server) -> int:
    count: int = json.loads(server.get("/health"))["members_waiting"]
    return count
