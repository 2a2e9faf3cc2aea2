"""What the model wrote as the message that is stored, and as the client gets it."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

import orjson

from gymdata.commands.record.messages import spells_call
from gymdata.commands.record.request import AgentCompletion, AgentRequest, FinishReason, TokenLogprob
from gymdata.commands.record.sessions import Session
from gymdata.engines.port import Chat, Generation
from gymdata.rollouts.messages import Message, ToolCall


def read_generation(
    chat: Chat, session: Session, request: AgentRequest, generation: Generation
) -> tuple[Message, AgentCompletion]:
    """Both of the next call of ``session``."""
    ids = [int(i) for i in generation.token_ids]
    message: Message = dict(chat.parse(ids, request.tools, calls=request.tool_choice != "none"))
    stop = generation.stop_reason if isinstance(generation.stop_reason, str) else None
    if stop is not None and stop in (message.get("content") or ""):
        message["content"] = message["content"].partition(stop)[0]
    calls = [_with_id(call, session, number) for number, call in enumerate(message.pop("tool_calls", None) or ())]
    if not request.parallel_tool_calls and len(calls) > 1:
        message["calls_left_out"] = calls[1:]
        calls = calls[:1]
    if calls:
        message["tool_calls"] = calls
    elif request.tools and spells_call(message):
        message["unparsed_call"] = True
    completion = AgentCompletion(
        id=secrets.token_hex(12),
        created=int(time.time()),
        content=message.get("content") or "",
        reasoning=message.get("reasoning"),
        tool_calls=calls,
        finish_reason=_finish_reason(generation, calls),
        prompt_token_ids=list(generation.prompt_token_ids),
        token_ids=ids,
        logprobs=None if request.logprobs is None else _logprobs(chat, request, generation),
        stop_sequence=stop,
    )
    return message, completion


def _with_id(call: ToolCall, session: Session, number: int) -> ToolCall:
    """The same call twice in a conversation has two ids."""
    seed = orjson.dumps([session.rollout_id, len(session.steps), number])
    return {**call, "id": f"c{hashlib.blake2b(seed, digest_size=4).hexdigest()}", "type": "function"}


def _finish_reason(generation: Generation, calls: Sequence[ToolCall]) -> FinishReason:
    """Clients know no other word for an answer that its model did not end."""
    if generation.finish_reason in ("length", "repetition"):
        return "length"
    return "tool_calls" if calls else "stop"


def _logprobs(chat: Chat, request: AgentRequest, generation: Generation) -> list[TokenLogprob]:
    top = generation.top_log_probs or [()] * len(generation.token_ids)

    def name(token: int) -> str:
        return f"token_id:{token}" if request.tokens_as_ids else chat.decode([token])

    return [
        TokenLogprob(name(int(i)), float(p), [(name(int(j)), float(q)) for j, q in row[: request.logprobs]])
        for i, p, row in zip(generation.token_ids, generation.log_probs, top, strict=True)
    ]
