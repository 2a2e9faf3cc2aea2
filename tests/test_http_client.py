"""The HTTP client: how much of an answer is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError
from gymdata.http import HttpClient, Request, why_unreachable
from gymdata.urls import address
from tests.servers import serving


class Endless:
    """Sends what looks like one long JSON string until it is hung up on; counts what it could send."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.sent, self.hung_up = status, 0, 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        try:
            while True:
                await response.write(b'{"error": "' + b"x" * (1 << 16))
                self.sent += 1 << 16
        except (ConnectionError, asyncio.CancelledError):
            self.hung_up += 1
            raise


def answering(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> contextlib.AbstractContextManager[str]:
    """The URL of a server that answers every request so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return serving(app)


def ask(url: str, use: Callable[[HttpClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        client = HttpClient(address(url, "--endpoint", "http://x"), "engine", timeout_s=20, max_retries=3, pause_s=0.0)
        await client.open()
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_longer_answer_than_was_asked_for_is_not_read() -> None:
    """Reading stops at the limit, the fault names it, and the request is not made again."""
    endless = Endless()
    with answering(endless.answer) as url:
        with pytest.raises(OutsideError, match="more than 100,000 bytes") as caught:
            ask(url, lambda client: client.ask(Request("GET", "/x", most_bytes=100_000), dict))
        assert (caught.value.system, caught.value.retryable) == ("engine", False)
        with pytest.raises(OutsideError, match=r"more than 16,777,216 bytes"):
            ask(url, lambda client: client.ask(Request("GET", "/x"), dict))
    # What lies in the buffers of the connection may have been sent as well.
    assert endless.sent < 16_777_216 + 100_000 + (16 << 20)


def test_a_length_that_is_announced_is_refused_unread() -> None:
    """Content-Length says it before anything is read."""

    async def announced(request: web.Request) -> web.Response:
        return web.Response(body=b'"' + b"x" * 200_000 + b'"')

    with answering(announced) as url, pytest.raises(OutsideError, match="more than 100,000 bytes"):
        ask(url, lambda client: client.ask(Request("GET", "/x", most_bytes=100_000), dict))


def test_a_body_that_is_not_encoded_as_its_headers_say_is_named_so() -> None:
    """Bytes that claim to be gzip and are not: the message names the response's body, and another try may do better."""

    async def not_gzip(request: web.Request) -> web.Response:
        return web.Response(body=b"{}", headers={"Content-Encoding": "gzip"})

    with (
        answering(not_gzip) as url,
        pytest.raises(OutsideError, match="body is incomplete or not encoded as its headers") as caught,
    ):
        ask(url, lambda client: client.ask(Request("GET", "/x", retries=0), dict))
    assert caught.value.retryable


def test_the_beginning_of_an_endless_refusal_is_told() -> None:
    """A 4xx or 5xx that never ends is that status with its first words."""
    for status, words in ((400, r"refused \(400\)"), (500, "answered 500")):
        endless = Endless(status)
        with answering(endless.answer) as url, pytest.raises(OutsideError, match=words + ".*xxx"):
            ask(url, lambda client: client.ask(Request("GET", "/x", retries=0), dict))
        assert endless.sent < 32 << 20


def test_what_an_engine_may_answer_grows_with_the_request() -> None:
    """The limit covers a sound answer of any size that was asked for, and is far from 1 GiB for a small one."""
    sampler = ServerSampler("http://h")
    small = sampler.most_bytes({"n": 1, "max_tokens": 8, "logprobs": 5, "prompt": [1] * 10})
    assert small < 2 << 20
    top = {"token": "token_id:151643", "logprob": -12.345678901234567, "bytes": [255] * 32}
    one = {**top, "top_logprobs": [top] * 6}
    choice = {"token_ids": [151643] * 2_000, "logprobs": {"content": [one] * 2_000}, "text": "x" * 32_000}
    answer = {"choices": [choice] * 3, "prompt_token_ids": [151643] * 10_000}
    body = {"n": 3, "max_tokens": 2_000, "logprobs": 5, "prompt": [151643] * 10_000}
    assert len(json.dumps(answer)) < sampler.most_bytes(body) < 100 << 20


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_server_that_fails_is_tried_as_often_as_was_asked_for(retries: int) -> None:
    """Once, and as many times again: each try may cost money, or an attempt."""
    tries = 0

    async def fail(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.Response(status=500)

    with answering(fail) as url, pytest.raises(OutsideError):
        ask(url, lambda client: client.ask(Request("GET", "/x", retries=retries), dict))
    assert tries == 1 + retries


def test_a_machine_that_takes_no_connection_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not even refuse: the error says so with the time for a connection, not with that for an answer."""
    monkeypatch.setattr("gymdata.http._CONNECT_S", 0.2)
    with contextlib.ExitStack() as open_sockets:
        full = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(OutsideError, match=r"cannot be reached: no connection within 0\.2 s") as caught:
            ask(url, lambda client: client.ask(Request("GET", "/x", retries=0), dict))
    assert (caught.value.fatal, caught.value.retryable) == (True, True)


def test_a_host_with_several_addresses_that_all_refuse_is_named_once() -> None:
    """localhost is often both ::1 and 127.0.0.1: asyncio then raises one error with the text of each."""
    refused = "[Errno 111] Connect call failed"
    error = OSError(f"Multiple exceptions: {refused} ('::1', 9, 0, 0), {refused} ('127.0.0.1', 9)")
    assert why_unreachable(error, "localhost", 9) == "nothing answers at localhost:9"


def test_a_redirect_is_not_followed() -> None:
    """The key and the body of a request are sent to no other place than the given one; where it leads is said."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=302, headers={"Location": "http://elsewhere.example/v1/take"})

    with (
        answering(answer) as url,
        pytest.raises(OutsideError, match=r"302, which leads to http://elsewhere\.example") as refused,
    ):
        ask(url, lambda client: client.ask(Request("POST", "/v1/completions", {"prompt": [1]}), dict))
    assert (asked, refused.value.fatal) == (["/v1/completions"], True)
