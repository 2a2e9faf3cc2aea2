"""A streamed request to the recorder, by a client that may go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from gymdata.commands.record.server import Service
from tests.record.scripted_engine import Recording

#: What a stream has before its answer.
WAITING = ": the model is writing\n\n"


async def streamed(
    r: Recording,
    path: str,
    body: dict[str, Any],
    seen: Callable[[str], bool] = lambda _: False,
    service: Service | None = None,
) -> tuple[int, str]:
    """Status and text of a streamed answer, which soon says that the model is writing (``WAITING``); the client goes away
    as soon as ``seen`` is true of the text so far."""
    if service is None:
        service = Service(r.recorder.config, r.recorder)
        service.alive_s = 0.01
    gone, text, status = asyncio.Event(), "", 0

    async def send(message: dict[str, Any]) -> None:
        nonlocal text, status
        status = message.get("status", status)
        text += message.get("body", b"").decode()
        if seen(text):
            gone.set()
            await asyncio.sleep(0)

    headers = [(b"host", b"testserver"), (b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    scope |= {"scheme": "http", "server": ("testserver", 80), "client": ("127.0.0.1", 1)}
    async with asyncio.timeout(60):
        await r.app(service)(scope, receiving(json.dumps({**body, "stream": True}).encode(), gone), send)
    return status, text


def receiving(body: bytes, gone: asyncio.Event) -> Callable[[], Awaitable[dict[str, Any]]]:
    """ASGI's ``receive`` of a client that sends its body at once and hangs up when ``gone`` is set."""
    sent = [body]

    async def receive() -> dict[str, Any]:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def asked(dialect: str, **more: Any) -> tuple[str, dict[str, Any]]:
    message = [{"role": "user", "content": "x"}]
    path, body = {
        "chat": ("/s/k/v1/chat/completions", {"messages": message}),
        "messages": ("/s/k/v1/messages", {"messages": message, "max_tokens": 50}),
        "responses": ("/s/k/v1/responses", {"input": "x"}),
    }[dialect]
    return path, {"model": "m", **body, **more}
