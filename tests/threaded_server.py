"""A real aiohttp server on its own event loop in a thread, for tests that are clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web


@contextlib.contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """Base URL of ``app`` on 127.0.0.1."""
    loop = asyncio.new_event_loop()
    up = threading.Event()
    url: list[str] = []

    async def begin() -> web.AppRunner:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def life() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(begin())
        up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=life, daemon=True)
    thread.start()
    up.wait()
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
