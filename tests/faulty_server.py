"""A small real HTTP server that speaks enough of vLLM's API to collect from, and misbehaves on demand.

Invariants: an answer depends only on (seed + choice, prompt ids, max_tokens), so that two runs against it agree.
``python tests/faulty_server.py --port 0 --mode ok --latency 0.01`` prints its port on the first line of stdout.
POST /fault {"mode": "500", "count": 3} makes the next 3 completions fail (count -1: all from now on).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import struct
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

#: What the content modes put in the place of the first id or log-probability.
_IDS = {"negative_id": -1, "huge_id": 2**40, "unknown_id": 2**30, "fractional_id": 1.5}
_LOGPROBS: dict[str, Any] = {"nan": math.nan, "infinite": -math.inf, "positive": 1e-3, "placeholder": -9999.0}
_LOGPROBS |= {"huge_logprob": -(10**400), "text_logprob": "-1"}
_FAILING = ("401", "429", "500", "dead", "garbage", "hang", "disconnect", "endless")
_SHAPES = ("no_ids", "no_logprobs", "wrong_prompt_ids", "raw", "short", "too_many", "other_model")
MODES = ("ok", *_FAILING, *_SHAPES, *_IDS, *_LOGPROBS, "empty", "odd_alternatives")


@dataclass
class Settings:
    """``fail_first``: how many completions the mode applies to, -1 for all. ``skip``: completions before it begins.

    ``slots``: requests that are answered at a time (0: all).
    """

    mode: str = "ok"
    fail_first: int = -1
    skip: int = 0
    latency: float = 0.0
    slots: int = 0
    #: Names of the weights: after three tokens the next.
    versions: str = ""
    vocab: int = 200
    eos: int = 2
    max_model_len: int = 4096
    name: str = "fake"
    retry_after: str = "0"
    requests: list[dict[str, Any]] = field(default_factory=list)


SETTINGS = web.AppKey("settings", Settings)
SLOTS = web.AppKey("slots", asyncio.Semaphore)


def build(settings: Settings) -> web.Application:
    """The application; ``app[SETTINGS]`` is the given object, to look at and to change while it runs."""
    app = web.Application(client_max_size=64 << 20)
    app[SETTINGS] = settings
    app[SLOTS] = asyncio.Semaphore(settings.slots or 1 << 30)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/version", _version)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_post("/fault", _fault)
    return app


def draw(seed: int, prompt: list[int], max_tokens: int, settings: Settings) -> tuple[list[int], list[float], str]:
    """(ids, log-probs, finish reason), a pure function of its arguments."""
    source = hashlib.blake2b(struct.pack(f"<q{len(prompt)}i", seed, *prompt), digest_size=8).digest()
    ids: list[int] = []
    values: list[float] = []
    for position in range(max_tokens):
        word = hashlib.blake2b(source + struct.pack("<i", position), digest_size=8).digest()
        number = int.from_bytes(word, "little")
        token = settings.eos if number % 12 == 0 else (number >> 8) % settings.vocab
        ids.append(token)
        # exactly representable in float32, so that nothing is lost on the way to disk
        values.append(-float((number >> 20) % 4096 + 1) / 1024.0)
        if token == settings.eos:
            return ids, values, "stop"
    return ids, values, "length"


async def _models(request: web.Request) -> web.Response:
    settings = request.app[SETTINGS]
    card = {"id": settings.name, "root": settings.name, "parent": None, "max_model_len": settings.max_model_len}
    return web.json_response({"object": "list", "data": [card]})


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.0.faulty"})


async def _fault(request: web.Request) -> web.Response:
    settings, order = request.app[SETTINGS], await request.json()
    settings.mode, settings.fail_first = order["mode"], int(order.get("count", -1))
    return web.json_response({"mode": settings.mode})


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _serve(request, await request.json(), _answer)


async def _serve(request: web.Request, body: dict[str, Any], answer: Any) -> web.StreamResponse:
    settings = request.app[SETTINGS]
    settings.requests.append(body)
    mode = "ok"
    if settings.skip > 0:
        settings.skip -= 1
    elif settings.fail_first != 0:
        mode = settings.mode
        settings.fail_first -= settings.fail_first > 0
    if settings.latency:
        async with request.app[SLOTS]:
            await asyncio.sleep(settings.latency)
    if mode == "401":
        return web.json_response({"error": {"message": "expired key"}}, status=401)
    if mode == "429":
        return web.json_response(
            {"error": {"message": "too many"}}, status=429, headers={"Retry-After": settings.retry_after}
        )
    if mode == "dead":
        text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        return web.json_response({"error": {"message": text, "type": "InternalServerError", "code": 500}}, status=500)
    if mode == "500":
        return web.json_response({"error": {"message": "boom"}}, status=500)
    if mode == "endless":
        return web.Response(body=b" " * (64 << 20))
    if mode == "garbage":
        return web.Response(text="<html>bad gateway</html>", content_type="text/html")
    if mode == "hang":
        await asyncio.sleep(3600)
    if mode == "disconnect":
        assert request.transport is not None
        request.transport.close()
    return web.json_response(answer(body, settings, mode))


def _spans(names: list[str], n: int) -> list[dict[str, Any]]:
    """Which weights sampled which of ``n`` tokens."""
    cut = min(3, n) if len(names) > 1 else n
    spans = [{"version": name, "start": a, "end": b} for name, a, b in ((names[0], 0, cut), (names[-1], cut, n))]
    return [span for span in spans if span["end"] > span["start"]]


def _answer(body: dict[str, Any], settings: Settings, mode: str) -> dict[str, Any]:
    prompt = body["prompt"]
    choices = []
    for index in range(body.get("n", 1)):
        ids, values, reason = draw(body.get("seed", 0) + index, prompt, body["max_tokens"], settings)
        if body.get("top_k") == 1 and mode != "raw":
            values = [0.0] * len(ids)
        body = {"logprobs": 0, **body}
        tops = [
            {f"token_id:{(t + j) % settings.vocab}": v - j for j in range(body["logprobs"] + 1)}
            for t, v in zip(ids, values, strict=True)
        ]
        choice: dict[str, Any] = {
            "index": index,
            "text": "",
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": values, "top_logprobs": tops},
        }
        if settings.versions:
            choice["weight_versions"] = _spans(settings.versions.split(","), len(ids))
        if mode == "no_ids":
            del choice["token_ids"], choice["prompt_token_ids"]
        elif mode == "no_logprobs":
            choice["logprobs"] = None
        elif mode == "wrong_prompt_ids":
            choice["prompt_token_ids"] = [0, *prompt]
        elif mode == "short":
            choice["logprobs"]["token_logprobs"] = values[:-1]
        elif mode in _IDS:
            choice["token_ids"] = [_IDS[mode], *ids[1:]]
        elif mode in _LOGPROBS:
            choice["logprobs"]["token_logprobs"] = [_LOGPROBS[mode], *values[1:]]
        elif mode in ("too_many", "empty"):
            more = body["max_tokens"] + 1 if mode == "too_many" else 0
            choice |= {"token_ids": [3] * more, "finish_reason": "stop"}
            choice["logprobs"] = {"token_logprobs": [-1.0] * more, "top_logprobs": [{}] * more}
        elif mode == "odd_alternatives":
            choice["logprobs"]["top_logprobs"] = [{"token_id:-5": -1.0} for _ in ids]
        choices.append(choice)
    return {"id": "cmpl-0", "model": "other" if mode == "other_model" else settings.name, "choices": choices}


async def serve(settings: Settings, port: int) -> tuple[web.AppRunner, int]:
    """Start on 127.0.0.1; returns the runner (to clean up) and the port."""
    runner = web.AppRunner(build(settings), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    assert runner.addresses
    return runner, int(runner.addresses[0][1])


async def _main(settings: Settings, port: int) -> None:
    runner, bound = await serve(settings, port)
    print(bound, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


#: Mode of the server → what the fault's message says.
FAULTS = {
    "no_ids": "does not return token ids",
    "no_logprobs": "does not return log-probabilities",
    "wrong_prompt_ids": "3 ids were sent and 4 read, and at position 0 got 0, expected 5",
    "short": "5 log-probabilities for 6 generated ids",
    "negative_id": "id at position 0 is not in the vocabulary: got -1, expected 0 to 199",
    "huge_id": f"got {2**40}, expected 0 to 199",
    "unknown_id": f"got {2**30}, expected 0 to 199",
    "fractional_id": "got 1.5, expected an integer",
    "nan": "log-probability of token 0 is nan",
    "infinite": "log-probability of token 0 is -inf",
    "positive": "log-probability of token 0 is 0.001, expected at most 0",
    "huge_logprob": "log-probability",
    "text_logprob": "got '-1', expected a number",
    "placeholder": "-9999, a placeholder",
    "too_many": "7 tokens were generated, expected at most 6",
    "other_model": "of model 'other', expected 'fake'",
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="ok")
    plain = ("fail_first", "skip", "latency", "slots", "versions", "vocab", "eos", "max_model_len", "name")
    for name in (*plain, "retry_after"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    bind = given.pop("port")
    asyncio.run(_main(Settings(**given), bind))
