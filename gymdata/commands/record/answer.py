"""What the model wrote as the message that is stored and as the client gets it, at once or while the engine samples.

Invariants: a stream says nothing early but what the message that is stored begins with: text that may be a call, a stop
text or half a letter waits until it is decided; the message is read from all ids, so that it is the same with a stream and
without; a stream that said something else ends with an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import orjson

from gymdata.commands.record.messages import spells_call
from gymdata.commands.record.request import AgentCompletion, AgentRequest, CompletionDelta, RequestError, TokenLogprob
from gymdata.commands.record.sessions import Session
from gymdata.engines.port import Chat, Generation
from gymdata.rollouts.messages import Message


class Answer:
    """The answer to one request. ``stops``: texts that end a completion. ``complete``: all of a streamed answer went out;
    ``unread``: its client went away before it had the answer."""

    def __init__(self, chat: Chat, request: AgentRequest, stops: Sequence[str]) -> None:
        self._chat, self._request, self._stops = chat, request, stops
        self.id, self.created = secrets.token_hex(12), int(time.time())
        self.prompt: Sequence[int] = ()
        self.complete = self.unread = False
        #: There is something to say, or nothing will follow.
        self.changed = asyncio.Event()
        self._early = _Early(chat, request, stops)

    # --- while the engine samples -----------------------------------------------------------------------------------

    def on_tokens(self, index: int, ids: Sequence[int]) -> None:  # noqa: ARG002 - the port's signature
        """The next ids of the completion."""
        self._early.feed(ids)
        self.changed.set()

    async def deltas(self, work: asyncio.Future[AgentCompletion]) -> AsyncIterator[CompletionDelta]:
        """The parts of a streamed answer. ``work``: makes its completion, and sets ``changed`` when it ends. Raises its
        RequestError."""
        delta = CompletionDelta(self.id, self.created, len(self.prompt))
        yield delta
        while not work.done():
            await self.changed.wait()
            self.changed.clear()
            for part in self._early.parts(delta):
                yield part
        completion = await asyncio.shield(work)
        for part in self._early.rest(delta, completion):
            yield part
        yield replace(delta, tool_calls=completion.tool_calls, end=completion)
        self.complete = True

    # --- when it has ended ------------------------------------------------------------------------------------------

    def read(self, session: Session, generation: Generation) -> tuple[Message, AgentCompletion]:
        """What the model wrote as the message that is stored, and as the client gets it."""
        chat, request, ids = self._chat, self._request, [int(i) for i in generation.token_ids]
        ended = ids[:-1] if ids and ids[-1] in getattr(chat, "stop_token_ids", chat.end_of_turn_ids) else ids
        text = chat.decode(ended)
        stop = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        if stop is not None and stop in text:
            text = text[: text.index(stop)]
        message: Message = dict(chat.parse(ids, request.tools, calls=request.tool_choice != "none"))
        calls = message.pop("tool_calls", None) or []
        if stop is not None and stop in (message.get("content") or ""):
            message["content"] = message["content"].partition(stop)[0]
        numbered = []
        for number, call in enumerate(calls):
            # The same call twice in a conversation has two ids.
            seed = orjson.dumps([session.rollout_id, len(session.steps), number])
            numbered.append({**call, "id": f"c{hashlib.blake2b(seed, digest_size=4).hexdigest()}", "type": "function"})
        if numbered and not request.parallel_tool_calls:
            numbered, left_out = numbered[:1], numbered[1:]
            if left_out:
                message["calls_left_out"] = left_out
        if numbered:
            message["tool_calls"] = numbered
        elif request.tools and spells_call(message):
            message["unparsed_call"] = True
        finish = "tool_calls" if numbered and generation.finish_reason == "stop" else generation.finish_reason
        completion = AgentCompletion(
            id=self.id,
            created=self.created,
            text=text,
            content=message.get("content") or "",
            reasoning=message.get("reasoning"),
            tool_calls=numbered,
            # Clients know no other word for an answer that its model did not end.
            finish_reason="length"
            if finish in ("length", "repetition")
            else "tool_calls"
            if finish == "tool_calls"
            else "stop",
            n_prompt_tokens=len(self.prompt),
            n_generated_tokens=len(ids),
            logprobs=None if request.logprobs is None else self._logprobs(generation, ids),
            stop_sequence=stop,
            prompt_token_ids=list(self.prompt),
            token_ids=ids,
        )
        return message, completion

    def _logprobs(self, generation: Generation, ids: Sequence[int]) -> list[TokenLogprob]:
        top = generation.top_log_probs or [()] * len(ids)

        def name(token: int) -> str:
            return f"token_id:{token}" if self._request.tokens_as_ids else self._chat.decode([token])

        return [
            TokenLogprob(name(i), float(p), [(name(int(j)), float(q)) for j, q in row])
            for i, p, row in zip(ids, generation.log_probs, top, strict=True)
        ]


class _Early:
    """What of the completion is certain before its end. ``emitted``: what the client has of it."""

    def __init__(self, chat: Chat, request: AgentRequest, stops: Sequence[str]) -> None:
        self._reading = chat.reading(request.tools)
        self._stops = stops
        self._stopped = False
        self._pending = ""
        self._new = {"reasoning": "", "content": ""}
        self.emitted = {"reasoning": "", "content": ""}

    def feed(self, ids: Sequence[int]) -> None:
        reasoning, content = self._reading.feed(ids)
        self._new["reasoning"] += reasoning
        self._pending += content
        if not self._stopped:
            stop_index = min((k for stop in self._stops if (k := self._pending.find(stop)) >= 0), default=None)
            self._stopped = stop_index is not None
            size = len(self._pending)
            # A stop text may begin with the last letters.
            may = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if self._pending.endswith(stop[:n]))
            size = stop_index if stop_index is not None else size - max(may, default=0)
            self._new["content"] += self._pending[:size]
            self._pending = self._pending[size:]

    def parts(self, delta: CompletionDelta) -> Iterator[CompletionDelta]:
        """What is certain and was not given."""
        for name in ("reasoning", "content"):
            text, self._new[name] = self._new[name], ""
            if text:
                self.emitted[name] += text
                yield replace(delta, reasoning=text) if name == "reasoning" else replace(delta, content=text)

    def rest(self, delta: CompletionDelta, completion: AgentCompletion) -> Iterator[CompletionDelta]:
        """What was not given of a completion that has ended. Raises RequestError when something else was given."""
        for name, text in (("reasoning", completion.reasoning or ""), ("content", completion.content)):
            if not text.startswith(self.emitted[name]):
                raise RequestError(
                    "internal", f"the stream gave another {name} than is recorded: send the request again"
                )
            self._new[name] = text[len(self.emitted[name]) :]
        yield from self.parts(delta)
