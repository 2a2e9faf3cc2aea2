"""A sampler on a small real server that misbehaves on demand (``tests/faulty_server.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gymdata.engines.port import SampleRequest
from gymdata.engines.servers.vllm_server import ServerSampler
from tests.faulty_server import Settings, serve

Use = Callable[[Any], Awaitable[Any]]


def against(settings: Settings, use: Use, kind: type[ServerSampler] = ServerSampler, **options: Any) -> Any:
    """What ``use`` makes of a sampler, not started, on a server with these settings."""

    async def main() -> Any:
        runner, port = await serve(settings, 0)
        sampler = kind(f"http://127.0.0.1:{port}/v1", **{"pause_s": 0.0, **options})
        try:
            return await use(sampler)
        finally:
            await sampler.close()
            await runner.cleanup()

    return asyncio.run(main())


async def started(sampler: ServerSampler) -> Any:
    """The facts of the server."""
    return await sampler.start()


def sampling(request: SampleRequest) -> Use:
    """The generations of one request, after the start."""

    async def use(sampler: ServerSampler) -> Any:
        await sampler.start()
        return await sampler.sample(request)

    return use
