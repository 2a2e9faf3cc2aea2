"""What a port of gymdata may do wrong, once its work is done: the answer is late, lost, cut, or not what it must be.

``Fault`` is a middleware for any aiohttp application: a request whose body matches ``mark`` is answered as ``how`` says, by
a name of ``TRANSPORT`` or by what a function makes of the good answer's JSON. ``FaultyCode`` does the same to code in this
process (``tests/faulty_code.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

#: What can happen to any answer, whatever it says.
TRANSPORT = ("429", "500", "garbage", "half JSON", "hang", "closed socket", "huge body")
#: Other faults are in what is answered.
FAULTS = (*TRANSPORT, "wrong ids", "wrong lengths", "NaN", "duplicate ids", "nobody there")
#: Nothing listens there.
NOWHERE = "http://127.0.0.1:9"

How = str | Callable[..., Any]


@dataclass
class Fault:
    """``times``: how many answers are spoiled (−1: all); ``met``: how many were."""

    how: How | None = None
    path: str = ""
    mark: str = ""
    times: int = -1
    met: int = 0
    middleware: Any = field(init=False)

    def __post_init__(self) -> None:
        @web.middleware
        async def middleware(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            asked = await request.text()
            answer = await handler(request)
            if (
                self.how is None
                or self.met == self.times
                or self.path not in request.path
                or not re.search(self.mark, asked)
            ):
                return answer
            self.met += 1
            return await spoiled(self.how, request, answer)

        self.middleware = middleware

    def become(self, how: How | None, path: str = "", times: int = -1) -> None:
        """Another fault, or none, from now on."""
        self.how, self.path, self.times, self.met = how, path, times, 0


async def spoiled(how: How, request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
    """What comes in place of a good answer."""
    assert isinstance(answer, web.Response)
    text = answer.text or ""
    if callable(how):
        return web.Response(text=json.dumps(how(json.loads(text))), content_type="application/json")
    if how in ("429", "500"):
        refusal = {"error": {"message": "spoiled"}, "detail": "spoiled"}
        return web.json_response(refusal, status=int(how), headers={"Retry-After": "0"})
    if how == "garbage":
        return web.Response(text="<html>bad gateway</html>", content_type="text/html")
    if how == "half JSON":
        return web.Response(text=text[: len(text) // 2], content_type="application/json")
    if how == "hang":
        await asyncio.Event().wait()
    if how == "closed socket":
        assert request.transport is not None
        request.transport.close()
        return answer
    assert how == "huge body", how
    endless = web.StreamResponse(headers={"Content-Length": str(1 << 27)})
    endless.force_close()
    await endless.prepare(request)
    await endless.write(b'{"')
    return endless


class FaultyCode:
    """Sets the fault of the code in ``tests/faulty_code.py``: ``path`` names its method, ``how`` an expression."""

    variable = "GYMDATA_TEST_FAULT"

    def become(self, how: How | None, path: str = "", times: int = -1) -> None:
        os.environ.pop(self.variable, None)
        if how is not None:
            os.environ[self.variable] = f"{path} {how}"
