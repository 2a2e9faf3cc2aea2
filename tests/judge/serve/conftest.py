"""A judge that misbehaves on demand, and compare servers as processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.judge_server import Behaviour, judge_server


@dataclass
class Server:
    """A running ``gymdata serve-genrm``."""

    url: str
    process: subprocess.Popen[str]
    #: What it wrote before it served.
    said: str

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


def start(judge_url: str, folder: Path | None, *flags: str, cwd: Path | None = None) -> Server:
    command = [sys.executable, "-m", "gymdata.cli", "serve-genrm", "--endpoint", judge_url, "-m", "judge"]
    command += ["--port", "0", "--genrm-parse-retry-sleep-s", "0", "--set", "retry_pause=0", *flags]
    command += ["-o", str(folder)] if folder is not None else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"serving on (http://\S+?),", line):
            server = Server(found[1], process, said)
            _await(server)
            return server
    pytest.fail(f"the server did not start: {said}")


def _await(server: Server) -> None:
    """The socket is bound before the application listens, so the first request just waits its turn."""
    for _ in range(200):
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.get("/health")
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(0.05)
    pytest.fail("the server does not answer")


@pytest.fixture
def serve(judge: tuple[Behaviour, str], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server on the judge: ``serve(*flags, folder=…)``."""
    started: list[Server] = []

    def run(*flags: str, folder: Path | None = None, kept: bool = True) -> Server:
        place = (folder or tmp_path / "online") if kept else None
        started.append(start(judge[1], place, *flags, cwd=tmp_path))
        return started[-1]

    yield run
    for server in started:
        server.process.kill()
        server.process.wait()
        assert server.process.stderr is not None
        server.process.stderr.close()
