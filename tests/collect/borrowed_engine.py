"""The session's engine, lent to a collection that runs on an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gymdata.engines.port import Generation, SampleRequest
from tests.engine_fixtures import InProcess


class Borrowed:
    """The tests' shared engine, which lives on another event loop; closing it is left to its owner."""

    prefers_groups = False
    default_concurrency = 64

    def __init__(self, engine: InProcess, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine.sampler, loop

    async def start(self) -> Mapping[str, Any]:
        return self._engine.facts()  # type: ignore[no-any-return]  # the other loop's, without types

    async def sample(self, request: SampleRequest) -> list[Generation]:
        work = asyncio.run_coroutine_threadsafe(self._engine.sample(request), self._loop)
        return await asyncio.wrap_future(work)

    async def close(self) -> None: ...
