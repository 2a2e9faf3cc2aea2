"""A judge behind /v1/chat/completions, deterministic and badly behaved on demand.

A response's quality is the number in its text after ``q=``; the verdict follows from both qualities (and, with
``first_position_bias``, from the position). ``faults`` are used up one per request before good answers come; ``always``
never ends. ``python -m tests.judge_server --port 0 --latency 0.01`` prints its port on the first line of stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.servers import serving

OPEN_BRACES = "{" * 16_000
#: Fault → what the judge says in its place. The others are faults of the transport.
SAID = {
    "prose": "Both are fine, I like the first.",
    "half": '{"score_1": 4, "sco',
    "nan": '{"score_1": NaN, "score_2": 2, "ranking": 1}',
    "impossible": '{"score_1": 99, "score_2": 99, "ranking": 99}',
    "one score": '{"score_1": 5}',
    "braces": OPEN_BRACES,
    "nothing": "",
    "cut": '{"score_1": 5, "score_2": 1, "ranking": 1} But wait, the second',
    "open think": '<think>At first sight {"score_1": 5, "score_2": 1, "ranking": 1}. But wait',
    "reasoning apart": "",
    "beside a call": '{"score_1": 5, "score_2": 1, "ranking": 1}',
}
#: An answer with two verdicts.
DRAFT = (
    'Draft:\n```json\n{"score_1": 5, "score_2": 1, "ranking": 1}\n```\nNo: {"score_1": 1, "score_2": 5, "ranking": 6}'
)
#: What the answer has beside its text.
CALL = {"id": "c", "type": "function", "function": {"name": "verdict", "arguments": DRAFT}}
BESIDE: dict[str, dict[str, Any]] = {
    "reasoning apart": {"reasoning_content": DRAFT},
    "beside a call": {"tool_calls": [CALL]},
}
FINISH_REASONS = {"cut": "length"}
TRANSPORT = ("500", "429", "hang", "disconnect", "garbage", "no choices", "error in the answer", "error in the choice")


@dataclass
class Behaviour:
    """What the server does; changed while it runs. ``table`` overrides: (response_1, response_2) → text. ``slots``:
    answers at a time (0: all)."""

    faults: list[str] = field(default_factory=list)
    always: str | None = None
    name: str = "judge"
    slots: int = 0
    latency: float = 0.0
    first_position_bias: float = 0.0
    table: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Fault by response text: every comparison with that text fails so.
    poisoned: dict[str, str] = field(default_factory=dict)
    retry_after: str = "0"
    refuse_schema: bool = False
    gate: threading.Event | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)


def quality(text: str) -> float:
    found = re.search(r"q=(-?[\d.]+)", text)
    return float(found[1]) if found else 3.0


def verdict(one: str, two: str, bias: float = 0.0) -> str:
    """The verdict of an honest judge (with ``bias`` for the first position)."""
    a, b = min(5.0, quality(one) + bias), quality(two)
    ranking = 3.5 if a == b else min(6.0, max(1.0, round(3.5 - (a - b) * 0.75 - (0.5 if a > b else -0.5))))
    return "Here it is:\n```json\n" + json.dumps({"score_1": a, "score_2": b, "ranking": ranking}) + "\n```"


def shown(messages: list[dict[str, str]]) -> tuple[str, str]:
    by_role = {m["role"]: m["content"] for m in messages}
    if "response_1" in by_role:
        return by_role["response_1"], by_role["response_2"]
    one, _, two = by_role["user"].partition("# Response 1\n")[2].partition("\n\n# Response 2\n")
    return one.strip(), two.partition("\n\n")[0].strip()


async def _chat(request: web.Request, behaviour: Behaviour) -> web.StreamResponse:
    body = await request.json()
    if body["model"] not in behaviour.name.split():
        return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
    one, two = shown(body["messages"])
    behaviour.requests.append(body)
    behaviour.asked[one, two] += 1
    if behaviour.gate is not None:
        while not behaviour.gate.is_set():
            await asyncio.sleep(0.01)
    if behaviour.latency:
        async with request.app[SLOTS]:
            await asyncio.sleep(behaviour.latency)
    if behaviour.refuse_schema and "response_format" in body:
        return web.json_response({"error": {"message": "response_format is not supported"}}, status=400)
    fault = behaviour.poisoned.get(one) or behaviour.poisoned.get(two) or behaviour.always
    if fault is None and behaviour.faults:
        fault = behaviour.faults.pop(0)
    if fault == "500":
        return web.json_response({"error": {"message": "boom"}}, status=500)
    if fault == "400":
        return web.json_response({"error": {"message": "too long"}}, status=400)
    if fault == "429":
        return web.json_response(
            {"error": {"message": "slow down"}}, status=429, headers={"Retry-After": behaviour.retry_after}
        )
    if fault == "hang":
        await asyncio.sleep(3600)
    if fault == "disconnect":
        assert request.transport is not None
        request.transport.close()
    if fault == "garbage":
        return web.Response(text="<html>bad gateway</html>")
    if fault == "no choices":
        return web.json_response({"choices": []})
    text = SAID.get(fault or "") if fault in SAID else DRAFT if fault == "draft" else None
    if text is None:
        text = behaviour.table.get((one, two)) or verdict(one, two, behaviour.first_position_bias)
    message = {"role": "assistant", "content": text, **BESIDE.get(fault or "", {})}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    choice = {"index": 0, "message": message, "finish_reason": FINISH_REASONS.get(fault or "", "stop")}
    error = {"error": {"code": 502, "message": "the provider failed"}}
    choice |= error if fault == "error in the choice" else {}
    answer = {"choices": [choice], "usage": usage} | (error if fault == "error in the answer" else {})
    return web.json_response(answer)


SLOTS = web.AppKey("slots", asyncio.Semaphore)


def app_of(behaviour: Behaviour) -> web.Application:
    """The server's application."""
    app = web.Application(client_max_size=1 << 30)
    app[SLOTS] = asyncio.Semaphore(behaviour.slots or 1 << 30)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _chat(request, behaviour)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in behaviour.name.split()]})

    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    return app


@contextlib.contextmanager
def judge_server(behaviour: Behaviour) -> Iterator[str]:
    """Base URL of a judge on its own event loop in a thread."""
    with serving(app_of(behaviour)) as url:
        yield url


async def _main(behaviour: Behaviour, port: int) -> None:
    runner = web.AppRunner(app_of(behaviour), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--name", default="judge")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0)
    given = vars(parser.parse_args())
    bind = given.pop("port")
    asyncio.run(_main(Behaviour(**given), bind))
