"""Traces of rLLM's model gateway."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from gymdata.formats import FORMATS
from gymdata.formats.conversion.calls import PerCall
from gymdata.formats.conversion.importing import Importing, TableRow
from gymdata.formats.conversion.models import Int32, Model, Number, OrEmpty, Sampled, Several, read, turns_of
from gymdata.formats.text.rows import conversation, rollout_row
from gymdata.rollouts.messages import JsonObject


class Trace(Model):
    session_id: str
    trace_id: Any = None
    model: str = ""
    messages: Several[JsonObject]
    prompt_token_ids: Several[Int32]
    response_message: OrEmpty[JsonObject]
    completion_token_ids: Several[Int32]
    #: Empty where the sampler gave none.
    logprobs: Several[Number]
    finish_reason: str | None = None
    weight_version: int | None = None
    timestamp: float = 0.0
    metadata: OrEmpty[JsonObject]
    raw_request: OrEmpty[JsonObject]

    def sampled(self, where: str) -> Sampled:
        more: JsonObject = {"finish_reason": "length" if self.finish_reason == "length" else "stop"}
        if self.weight_version is not None:
            end = len(self.completion_token_ids)
            more["weight_versions"] = [{"version": str(self.weight_version), "start": 0, "end": end}]
        ids = self.prompt_token_ids, self.completion_token_ids, self.logprobs or None
        return Sampled(where, *ids, {}, more)


class Session(Model):
    calls: list[Trace] = Field(min_length=1)


@FORMATS.register("rllm-traces")
class RllmTraces(PerCall):
    """Traces of rLLM's model gateway, ``TraceRecord`` of its ``/sessions/ID/traces``: ``prompt_token_ids``,
    ``completion_token_ids``, ``logprobs``, ``weight_version``, the conversation of the last call; no rewards."""

    content = "traces of rLLM's gateway"
    session, call = "session_id", "trace_id"
    keys = ({"trace_id", "session_id", "prompt_token_ids", "completion_token_ids"},)

    def row(self, item: Any, importing: Importing) -> TableRow:
        calls = sorted(read(Session, item).calls, key=lambda call: call.timestamp)
        last = calls[-1]
        chat = [*last.messages, last.response_message]
        messages = conversation(chat, "messages")
        sampled = []
        for n, call in enumerate(calls):
            one, at = call.sampled(f"calls[{n}]"), len(call.messages)
            # Calls that the last conversation does not have are turns without a message.
            is_there = at < len(chat) and chat[at].get("content") == call.response_message.get("content")
            sampled.append(one._replace(message=messages[at]) if is_there else one)
        about = {"session_id": last.session_id, "metadata": last.metadata}
        row = rollout_row(
            {"calls": item["calls"], "tools": last.raw_request.get("tools"), **about},
            [],
            messages,
            importing,
            reward=None,
            rewards={},
            texts=("calls",),
            about=tuple(about),
            policy=last.model,
            truncated=last.finish_reason == "length",
            turns=turns_of(sampled, importing, "calls"),
            known_as=[last.session_id, *(call.trace_id for call in calls)],
        )
        first = calls[0].timestamp
        times = {
            "started_at": datetime.fromtimestamp(first, UTC).isoformat(),
            "duration_s": max(0.0, last.timestamp - first),
        }
        return row | (times if first else {})
