"""A server of the pages in this process, and a headless Chromium that looks at it and minds what it does."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.urls import address_of, listening_socket

Serve = Callable[..., str]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(PATH, …, setting=value)``: the base URL of ``gymdata view`` over the paths."""
    import uvicorn

    from gymdata.view.app import create_app
    from gymdata.view.run import expanded, server_of
    from gymdata.view.settings import ViewConfig

    with contextlib.ExitStack() as stack:

        def start(*paths: Path, **settings: Any) -> str:
            found = [one for path in paths for one in expanded(Path(path))]
            app = stack.enter_context(create_app(found, ViewConfig.load(overrides=settings)))
            socket = stack.enter_context(contextlib.closing(listening_socket("127.0.0.1", 0)))
            server = uvicorn.Server(server_of(app))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
            thread.start()

            def stop() -> None:
                server.should_exit = True
                thread.join(10)

            stack.callback(stop)
            deadline = time.monotonic() + 30
            while not server.started and time.monotonic() < deadline:
                thread.join(0.01)
            return address_of(socket)

        yield start


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real headless Chromium. It ends with its module: playwright holds this thread's event loop, which others need."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra)")
    with playwright.sync_playwright() as running:
        own = running.chromium.executable_path
        found = next(filter(None, map(shutil.which, _NAMES)), own if Path(own).is_file() else None)
        if found is None:
            pytest.skip("no Chromium is installed: `apt-get install chromium`, or `playwright install chromium`")
        # Root, as in a container, has no sandbox.
        browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, serve: Serve) -> Iterator[Any]:
    """A page, closed before its server ends. Errors in its console, and requests to elsewhere, fail the test."""
    context = chromium.new_context(viewport={"width": 1280, "height": 720})
    page = context.new_page()
    faults: list[str] = []
    hosts: set[str] = set()

    def requested(request: Any) -> None:
        hosts.add(request.url.partition("//")[2].partition("/")[0].partition(":")[0])

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            faults.append(f"{message.text} ({message.location['url']})")

    page.on("console", said)
    page.on("pageerror", lambda error: faults.append(f"uncaught: {error}"))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", requested)
    page.set_default_timeout(30_000)
    yield page
    context.close()
    assert not faults
    assert hosts <= {"127.0.0.1", ""}
