"""A small real HTTP server that speaks enough of vLLM's API to collect from, and misbehaves on demand.

Invariants: an answer depends only on (seed + choice, prompt ids, max_tokens), so that two runs against it agree.
``python tests/faulty_server.py --port 0 --mode ok --latency 0.01`` prints its port on the first line of stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_FAILING = ("401", "429", "500", "dead", "garbage", "disconnect")
MODES = ("ok", *_FAILING, "no_ids", "no_logprobs", "wrong_prompt_ids", "raw", "too_many", "empty")


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
    if mode == "garbage":
        return web.Response(text="<html>bad gateway</html>", content_type="text/html")
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
        elif mode in ("too_many", "empty"):
            more = body["max_tokens"] + 1 if mode == "too_many" else 0
            choice |= {"token_ids": [3] * more, "finish_reason": "stop"}
            choice["logprobs"] = {"token_logprobs": [-1.0] * more, "top_logprobs": [{}] * more}
        choices.append(choice)
    return {"id": "cmpl-0", "model": settings.name, "choices": choices}


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
