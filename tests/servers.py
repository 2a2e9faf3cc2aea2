"""A real aiohttp server in a thread, for tests that are clients, or in a process of its own, which may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web


@contextlib.contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """Base URL of ``app`` on 127.0.0.1."""
    loop = asyncio.new_event_loop()
    up = threading.Event()
    url: list[str] = []

    async def begin() -> web.AppRunner:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def life() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(begin())
        up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=life, daemon=True)
    thread.start()
    up.wait()
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


FAULTY = Path(__file__).parent / "faulty_server.py"
JUDGE = Path(__file__).parent / "judge_server.py"


class ServerProcess:
    """``script`` with ``words``, until it is killed; the script prints its port first."""

    def __init__(self, script: Path, *words: str) -> None:
        self.script, self.port, self.words = script, 0, words
        self.start()

    def start(self) -> None:
        module = f"tests.{self.script.stem}"
        command = [sys.executable, "-m", module, "--port", str(self.port), *self.words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.script.parents[1])
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def server_processes(script: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; at the end all are gone."""
    servers: list[ServerProcess] = []

    def start(*words: str) -> ServerProcess:
        servers.append(ServerProcess(script, *words))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.kill()


@contextmanager
def ending_as_the_policy(*words: str) -> Iterator[ServerProcess]:
    """A server whose turns end as the sample policy's do: its answers depend on seed and prompt alone."""
    from gymdata.chat.template import TransformersChat

    policy = Path(__file__).parents[1] / "sample_data" / "policy"
    with server_processes(FAULTY) as start:
        yield start("--eos", str(TransformersChat.load(str(policy)).end_of_turn_ids[0]), *words)


class Watcher:
    """Does the next of ``then`` when so many are done, and what follows a message that was expected; keeps what is said
    and counted."""

    def __init__(self, *then: tuple[int, Callable[[], None]]) -> None:
        self.then = list(then)
        self.said: list[str] = []
        self.counts: list[dict[str, float]] = []
        #: Parts of messages, in this order, and what is then done.
        self.expected: list[tuple[str, Callable[[], None]]] = []

    def on(self, text: str, work: Callable[[], None]) -> None:
        self.expected.append((text, work))

    def update(self, **counts: float) -> None:
        self.counts.append(counts)
        if self.then and counts.get("done", 0) >= self.then[0][0]:
            self.then.pop(0)[1]()

    def message(self, text: str) -> None:
        self.said.append(text)
        if self.expected and self.expected[0][0] in text:
            self.expected.pop(0)[1]()
