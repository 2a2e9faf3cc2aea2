"""What a case works with: an engine that it scripts, a session of the recorder, and the questions that it asks of both.

A case is a function with the decorator ``case``. After it has run, every turn of its sessions must be what the engine
sampled, before and after the sessions are finished, whatever the case itself looked at.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gymdata.check.conformance.engine import Draw, ScriptedEngine
from gymdata.check.conformance.evidence import CaseFailure, RecordedTurn, difference, not_continued, recorded_turns
from gymdata.check.conformance.wires import WIRES, Reply, Wire
from gymdata.rollouts.messages import Message, ToolDefinition, Tools

if TYPE_CHECKING:
    import aiohttp

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


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a recorder must do, in one dialect."""

    name: str
    wire: Wire
    run: Callable[[Probe], Awaitable[str | None]]

    @property
    def title(self) -> str:
        return f"{self.wire.name}: {self.name}"


CASES: list[Case] = []


def case(name: str, *dialects: str) -> Callable[[Callable[[Probe], Awaitable[str | None]]], Any]:
    """Register a case for each of ``dialects``; its docstring says what must hold. What it returns is a note."""

    def register(run: Callable[[Probe], Awaitable[str | None]]) -> Any:
        CASES.extend(Case(name, WIRES[dialect], run) for dialect in dialects)
        return run

    return register


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


@dataclass
class Probe:
    """One case's view. ``key``: its session; ``keys``: all that it used."""

    wire: Wire
    engine: ScriptedEngine
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
        if ids is None:
            raise CaseFailure("the chat template cannot write this message: check with another tokenizer")
        while ids and ids[-1] in self.engine.tokens.stop_token_ids:
            ids.pop()
        text = self.engine.tokens.decode(ids).replace('": ', '":  ')
        self.say(text)
        return text

    @property
    def draws(self) -> list[Draw]:
        """What was sampled in this case so far."""
        return self.engine.draws

    def text_of(self, ids: Sequence[int]) -> str:
        return self.engine.tokens.decode(ids)

    def expect_read(self, draw: Draw, *texts: str, never: Sequence[str] = ()) -> None:
        """The prompt of ``draw`` has these texts in it, and none of ``never``."""
        prompt = self.text_of(draw.prompt)
        for text in texts:
            expect(text in prompt, f"the prompt that the engine read lacks {text!r}: {prompt!r:.300}")
        for text in never:
            expect(text not in prompt, f"the prompt that the engine read still has {text!r}: {prompt!r:.300}")

    def expect_continues(self, draw: Draw, before: Draw) -> str:
        """The prompt of ``draw`` begins with all ids of ``before``; returns the text of what follows them."""
        expect((problem := not_continued(draw, before.conversation, self.text_of)) is None, str(problem))
        return self.text_of(draw.prompt[len(before.conversation) :])

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
        """The answer to a request in the case's dialect."""
        key = key or self.key
        self.keys.add(key)
        body = self.wire.body(messages, tools, as_parts=as_parts, more=more)
        return await self.send("POST", f"/s/{key}{self.wire.path}", body)

    async def ask(self, messages: Sequence[Message], tools: Tools = (), **more: Any) -> Reply:
        """The reply to a request, which must succeed; ``stream=True`` reads it from a stream."""
        status, body, text = await self.post(messages, tools, **more)
        expect(status == 200, f"got {status} {text[:300]!r}, expected 200")
        try:
            if not more.get("stream"):
                return self.wire.read(body)
            return self.wire.read_stream(_events(text))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CaseFailure(
                f"the answer is not in the dialect's form ({type(error).__name__} {error}): {text[:300]!r}"
            ) from error

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
            expect(any(fails) or any(map(self.wire.error_of, events)), f"the stream has no error in it: {text[:300]!r}")
            return 500
        expect(status >= 400, f"got {status}, expected an error: {text[:300]!r}")
        expect(self.wire.error_of(body) is not None, f"the error is not in the dialect's form: {status} {text[:300]!r}")
        return status

    async def turns(self, key: str | None = None) -> list[RecordedTurn]:
        """What the recorder recorded of a session; nothing where it does not know it."""
        status, body, text = await self.send("GET", f"/rollouts/{key or self.key}?turns=true")
        if status == 404:
            return []
        expect(status == 200, f"GET /rollouts/KEY?turns=true: got {status} {text[:300]!r}, expected 200")
        return recorded_turns(body.get("turns") if isinstance(body, dict) else None)

    async def finish(self, key: str | None = None, **ending: Any) -> list[RecordedTurn]:
        """End a session; returns its turns."""
        key = key or self.key
        status, _, text = await self.send("POST", f"/rollouts/{key}/finish", ending)
        expect(status == 200, f"POST /rollouts/KEY/finish: got {status} {text[:300]!r}, expected 200")
        self._finished.add(key)
        return await self.turns(key)

    async def settle(self) -> None:
        """Every turn is what was sampled, and stays so when the sessions end."""
        recorded = {key: await self.turns(key) for key in sorted(self.keys)}
        turns = [turn for of_session in recorded.values() for turn in of_session]
        expect((problem := difference(turns, self.draws, self.engine.failed, self.text_of)) is None, str(problem))
        for key in sorted(recorded.keys() - self._finished):
            if before := [(turn.prompt, turn.ids, turn.log_probs) for turn in recorded[key]]:
                after = [(turn.prompt, turn.ids, turn.log_probs) for turn in await self.finish(key)]
                expect(after == before, f"finish changed the turns: {len(before)} before it, {len(after)} after it")


def expect(holds: bool, message: str) -> None:
    """Raises CaseFailure."""
    if not holds:
        raise CaseFailure(message)


def expect_text(reply: Reply, text: str) -> None:
    expect(reply.content == text, f"the client got {reply.content!r:.200}, sampled was {text!r:.200}")


def _events(text: str) -> list[tuple[str | None, str]]:
    """Name and data of each server-sent event."""
    events = []
    for frame in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(":") for line in frame.split("\n") if line and not line.startswith(":")]
        fields = {name: value.removeprefix(" ") for name, _, value in lines}
        if "data" in fields:
            events.append((fields.get("event"), fields["data"]))
    return events
