"""What a test of the recorder works with: an engine that it scripts, a session, and a client in each dialect.

After each test every turn of its sessions is what the engine sampled, before and after the sessions are finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gymdata.chat.template import TransformersChat
from gymdata.commands.collect.setup import load_parts
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.server import Service, create_app
from gymdata.commands.record.settings import RecordConfig
from gymdata.rollouts.messages import Message, ToolDefinition, Tools
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import Run
from gymdata.urls import address_of, listening_socket
from gymdata.workers.serving import server_of
from tests.record.token_server import Draw, TokenServer
from tests.record.wires import WIRES, Reply, Wire

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")
#: Dialects that speak in messages.
CONVERSATIONS = ("chat", "responses", "messages")
ADD: ToolDefinition = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


@dataclass(slots=True)
class RecordedTurn(Draw):
    """A turn with its complete prompt: a draw as the recorder has it."""

    agent: str | None

    @classmethod
    def of(cls, turns: list[dict[str, Any]]) -> list[RecordedTurn]:
        """The ``turns`` of GET /rollouts/KEY?turns=true."""
        return [
            cls(
                prompt.tolist(),
                turn["generation_token_ids"],
                turn["generation_log_probs"],
                turn["finish_reason"],
                turn.get("agent"),
            )
            for prompt, turn in zip(expand_prompts(turns), turns, strict=True)
        ]


def exactly(draws: Sequence[Draw]) -> list[tuple[Any, ...]]:
    """What was sampled, to the bit, in an order of its own."""
    return sorted((d.prompt, d.ids, [*map(as_float32, d.log_probs)], d.finish_reason) for d in draws)


def as_float32(value: float) -> bytes:
    """The bits of a log-probability on disk."""
    return struct.pack("<f", value)


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


@dataclass
class Probe:
    """One test's view. ``key``: its session; ``keys``: all that it used."""

    wire: Wire
    engine: TokenServer
    http: aiohttp.ClientSession
    url: str
    key: str = field(default_factory=lambda: f"check-{secrets.token_hex(6)}")
    keys: set[str] = field(default_factory=set)
    _finished: set[str] = field(default_factory=set)

    # --- the engine -------------------------------------------------------------------------------------------------

    def say(self, *texts: str, stop: bool = True, respell: bool = True) -> None:
        """What the engine samples next; ``stop``: and a stop token; ``respell``: in ids that no tokenizer would choose."""
        end = [self.engine.tokens.stop_token_ids[0]] if stop else []
        for text in texts:
            ids = self.engine.tokens.encode(text)
            self.engine.script.append([*(self.engine.respelled(ids) if respell else ids), *end])

    def say_message(self, **message: Any) -> str:
        """The engine samples ``message`` as the template writes it, with another spacing of its JSON; returns the text."""
        tools = [{"type": "function", "function": ADD}]
        ids = self.engine.tokens.written_by_template({"role": "assistant", "content": "", **message}, tools)
        assert ids is not None
        while ids and ids[-1] in self.engine.tokens.stop_token_ids:
            ids.pop()
        text = self.engine.tokens.decode(ids).replace('": ', '":  ')
        self.say(text)
        return text

    @property
    def draws(self) -> list[Draw]:
        """What was sampled in this test so far."""
        return self.engine.draws

    def text_of(self, ids: Sequence[int]) -> str:
        return self.engine.tokens.decode(ids)

    def expect_read(self, draw: Draw, *texts: str, never: Sequence[str] = ()) -> None:
        """The prompt of ``draw`` has these texts in it, and none of ``never``."""
        prompt = self.text_of(draw.prompt)
        assert [text for text in texts if text not in prompt] == []
        assert [text for text in never if text in prompt] == []

    def expect_continues(self, draw: Draw, before: Draw) -> str:
        """The prompt of ``draw`` begins with all ids of ``before``; returns the text of what follows them."""
        n = len(before.conversation)
        assert draw.prompt[:n] == before.conversation
        return self.text_of(draw.prompt[n:])

    # --- the recorder -----------------------------------------------------------------------------------------------

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any, str]:
        """Status, parsed body (None where it is not JSON) and text of an answer."""
        headers = {"authorization": "Bearer gymdata", "content-type": "application/json"}
        data = body if isinstance(body, (str, bytes)) else None if body is None else json.dumps(body)
        async with self.http.request(method, f"{self.url}{path}", data=data, headers=headers) as response:
            text = (await response.read()).decode("utf-8", "replace")
            try:
                return response.status, json.loads(text), text
            except ValueError:
                return response.status, None, text

    async def post(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        key: str | None = None,
        as_parts: bool = False,
        **more: Any,
    ) -> tuple[int, Any, str]:
        """The answer to a request in the test's dialect."""
        key = key or self.key
        self.keys.add(key)
        body = self.wire.body(messages, tools, as_parts=as_parts, more=more)
        return await self.send("POST", f"/s/{key}{self.wire.path}", body)

    async def ask(self, messages: Sequence[Message], tools: Tools = (), **more: Any) -> Reply:
        """The reply to a request, which must succeed; ``stream=True`` reads it from a stream."""
        status, body, text = await self.post(messages, tools, **more)
        assert status == 200, text
        return self.wire.read_stream(_events(text)) if more.get("stream") else self.wire.read(body)

    async def refused(self, messages: Sequence[Message], tools: Tools = (), **more: Any) -> int:
        """The status of a request that must be answered with an error of the dialect, in a stream too."""
        status, body, text = await self.post(messages, tools, **more)
        if status == 200 and more.get("stream"):
            events = list[Any]()
            for _, data in _events(text):
                with contextlib.suppress(ValueError):  # the mark at the end of a stream
                    events.append(json.loads(data))
            # Responses has events of its own for errors.
            fails = (isinstance(e, dict) and e.get("type") in ("error", "response.failed") for e in events)
            assert any(fails) or any(map(self.wire.error_of, events)), text
            return 500
        assert status >= 400, text
        assert self.wire.error_of(body) is not None, text
        return status

    async def turns(self, key: str | None = None) -> list[RecordedTurn]:
        """What the recorder recorded of a session; nothing where it does not know it."""
        status, body, text = await self.send("GET", f"/rollouts/{key or self.key}?turns=true")
        assert status in (200, 404), text
        return RecordedTurn.of(body["turns"]) if status == 200 else []

    async def finish(self, key: str | None = None, **ending: Any) -> list[RecordedTurn]:
        """End a session; returns its turns."""
        key = key or self.key
        status, _, text = await self.send("POST", f"/rollouts/{key}/finish", ending)
        assert status == 200, text
        self._finished.add(key)
        return await self.turns(key)

    async def settle(self) -> None:
        """Every turn is what was sampled, and stays so when the sessions end."""
        recorded = {key: await self.turns(key) for key in sorted(self.keys)}
        assert exactly([turn for turns in recorded.values() for turn in turns]) == exactly(self.draws)
        for key in sorted(recorded.keys() - self._finished):
            if recorded[key]:
                assert exactly(await self.finish(key)) == exactly(recorded[key])


def _events(text: str) -> list[tuple[str | None, str]]:
    """Name and data of each server-sent event."""
    events = []
    for frame in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(":") for line in frame.split("\n") if line and not line.startswith(":")]
        fields = {name: value.removeprefix(" ") for name, _, value in lines}
        if "data" in fields:
            events.append((fields.get("event"), fields["data"]))
    return events


@dataclass
class Served:
    """A recorder in front of an engine, both served in one loop that runs while a test does."""

    runner: asyncio.Runner
    engine: TokenServer
    http: aiohttp.ClientSession
    url: str

    def check(self, dialect: str, test: Callable[[Probe], Awaitable[None]]) -> None:
        probe = Probe(WIRES[dialect], self.engine, self.http, self.url)
        self.engine.begin()

        async def checked() -> None:
            await test(probe)
            await probe.settle()

        self.runner.run(checked())


def case(*dialects: str) -> Callable[[Callable[[Probe], Awaitable[None]]], Any]:
    """A test of the recorder in each of ``dialects``."""

    def test_of(run: Callable[[Probe], Awaitable[None]]) -> Any:
        @pytest.mark.parametrize("dialect", dialects)
        def test(dialect: str, served: Served) -> None:
            served.check(dialect, run)

        test.__doc__ = run.__doc__
        return test

    return test_of


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A recorder that writes to ``folder``, in front of an engine."""
    engine = TokenServer(TransformersChat.load(POLICY, tool_parser="none"))

    async def opened(stack: contextlib.AsyncExitStack) -> tuple[aiohttp.ClientSession, str]:
        endpoint = await stack.enter_async_context(engine.serving("127.0.0.1", 0))
        url = await stack.enter_async_context(_recorder_at(endpoint, folder))
        jar = aiohttp.DummyCookieJar()
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0), cookie_jar=jar)
        return await stack.enter_async_context(http), url

    interrupted = signal.getsignal(signal.SIGINT)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            yield Served(runner, engine, *runner.run(opened(stack)))
        finally:
            runner.run(stack.aclose())
            # uvicorn gives back the handler of the first ``run`` of the loop, which is over.
            signal.signal(signal.SIGINT, interrupted)


@contextlib.asynccontextmanager
async def _recorder_at(endpoint: str, folder: Path) -> AsyncIterator[str]:
    """The URL of a recorder in front of the engine at ``endpoint``."""
    settings = {"output": folder, "endpoint": [endpoint], "tokenizer": POLICY, "keep_reasoning": False}
    config = RecordConfig.of({**settings, "retries": 0, "seed": 1}, "test")
    parts = await asyncio.to_thread(load_parts, config.as_collect())  # asks the engine for its models
    bound = listening_socket("127.0.0.1", 0)
    with (
        contextlib.closing(bound),
        Run.open(folder, identity={}, extent={}, operation={}, facts={"stage": "record"}) as run,
    ):
        recorder = Recorder(config, parts, run, 1)

        async def stop() -> None:
            recorder.log.close()
            await recorder.sampler.close()

        service = Service(config, recorder)
        server = server_of(create_app(service, recorder.start, stop), service.stop)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield address_of(bound)
        finally:
            server.should_exit = True
            await serving
