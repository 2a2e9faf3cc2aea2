"""A server's streamed answer is read as the same answer at once, and is not asked for again once its ids went on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from gymdata.engines.port import SampleRequest
from gymdata.engines.servers.completions_stream import CompletionStream
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError

CHUNKS: list[dict[str, Any]] = [
    {"index": 1, "token_ids": [5], "prompt_token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}},
    {"index": 0, "token_ids": [7, 8], "prompt_token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}},
    {"index": 1, "token_ids": [], "logprobs": None, "finish_reason": "stop", "stop_reason": "x"},
    {"index": 0, "token_ids": [9], "logprobs": {"token_logprobs": [-2.0]}, "finish_reason": "length"},
]


def wire(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)


WHOLE = wire(*({"model": "m", "choices": [chunk]} for chunk in CHUNKS)) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_chunks_become_the_answer_however_they_are_cut(size: int) -> None:
    """Ids go on in their order, and lists of a choice are joined."""
    went: list[tuple[int, list[int]]] = []
    stream = CompletionStream(lambda index, ids: went.append((index, list(ids))), 2, None)
    for at in range(0, len(WHOLE), size):
        stream.feed(WHOLE[at : at + size])
    answer = stream.answer()
    assert went == [(1, [5]), (0, [7, 8]), (0, [9])]
    choices = {choice["index"]: choice for choice in answer["choices"]}
    assert choices[0]["token_ids"] == [7, 8, 9]
    assert choices[0]["logprobs"]["token_logprobs"] == [-0.5, -0.25, -2.0]
    assert (choices[1]["token_ids"], choices[1]["stop_reason"]) == ([5], "x")
    assert choices[1]["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_server_that_does_not_stream_is_read_all_the_same(end: bytes) -> None:
    """Its answer is one object, with a line feed after it or without."""
    stream = CompletionStream(lambda *_: None, 2, None)
    stream.feed(orjson.dumps({"model": "m", "choices": CHUNKS[:2]}) + end)
    assert {choice["index"] for choice in stream.answer()["choices"]} == {0, 1}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (WHOLE[:-20], "ended before its end"),
        (wire({"error": {"message": "no memory", "code": 500}}), "ends with an error: no memory"),
        (b"data: {half\n\n", "is not a stream of choices"),
        (wire({"choices": [{"index": 2, "token_ids": [4]}]}), "is not a stream of 2 choices"),
        (wire({"choices": [{"index": 0, "token_ids": [2**40]}]}), f"got {2**40}, expected 0 to 438"),
        (wire({"choices": [{"index": 0, "token_ids": [-5]}]}), "got -5, expected 0 to 438"),
    ],
)
def test_a_stream_without_its_end_is_no_answer(sent: bytes, message: str) -> None:
    """It is the engine's fault, by name."""
    stream = CompletionStream(lambda *_: None, 2, 439)

    def read() -> None:
        stream.feed(sent)
        stream.answer()

    with pytest.raises(OutsideError, match=message):
        read()


@asynccontextmanager
async def server(answer: Callable[[web.StreamResponse, int], Awaitable[None]]) -> AsyncIterator[str]:
    """A vLLM server whose streams are ``answer`` of the response and the number of the request."""
    n = iter(range(100))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": "m", "max_model_len": 100}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            size = body["max_tokens"]
            choice = {"index": 0, "token_ids": [1] * size, "prompt_token_ids": body["prompt"]}
            choice["finish_reason"] = "length"
            choice["logprobs"] = {"token_logprobs": [0.0] * size}
            return web.json_response({"model": "m", "choices": [choice]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await answer(response, next(n))
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def sampled(answer: Callable[[web.StreamResponse, int], Awaitable[None]], went: list[int]) -> list[int]:
    """The ids of one request that is streamed; ``went``: those that came before its end."""

    async def run() -> list[int]:
        async with server(answer) as url:
            sampler = ServerSampler(url, max_retries=2, pause_s=0.01)
            await sampler.start()
            try:
                request = SampleRequest("r", [1, 2], 10, on_tokens=lambda _, ids: went.extend(ids))
                return list((await sampler.sample(request))[0].token_ids)
            finally:
                await sampler.close()

    return asyncio.run(run())


def chunk(*ids: int, end: str | None = None, prompt: bool = False) -> bytes:
    choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": end}
    return wire({"model": "m", "choices": [choice | ({"prompt_token_ids": [1, 2]} if prompt else {})]})


def test_ids_go_on_before_the_server_has_ended() -> None:
    """The server ends its answer only when the first id went on."""
    went: list[int] = []

    async def answer(response: web.StreamResponse, _: int) -> None:
        await response.write(chunk(7, prompt=True))
        async with asyncio.timeout(30):
            while not went:
                await asyncio.sleep(0)
        await response.write(chunk(8, end="stop") + b"data: [DONE]\n\n")

    assert sampled(answer, went) == went == [7, 8]


def test_a_stream_that_breaks_is_asked_for_again_only_before_its_first_id() -> None:
    """Ids that a client has cannot be taken back; a stream that broke before is tried again."""
    tries: list[int] = []

    async def breaks_first(response: web.StreamResponse, n: int) -> None:
        tries.append(n)
        if n:
            await response.write(chunk(7, end="stop", prompt=True) + b"data: [DONE]\n\n")

    assert sampled(breaks_first, []) == [7]
    assert tries == [0, 1]

    async def breaks_later(response: web.StreamResponse, n: int) -> None:
        tries.append(n)
        await response.write(chunk(7, prompt=True))

    tries.clear()
    with pytest.raises(OutsideError, match="ended before its end"):
        sampled(breaks_later, [])
    assert tries == [0]
