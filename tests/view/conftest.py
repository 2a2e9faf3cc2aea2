"""The pages in this process, with and without a server, and a headless Chromium that minds what they do."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from gymdata.commands.view.app import create_app
from gymdata.commands.view.run import expanded, server_of
from gymdata.commands.view.settings import ViewConfig
from gymdata.rollouts.schema import COMPARISONS
from gymdata.urls import address_of, listening_socket
from tests.rollout_files import rollout, two_turns, write_run, write_table

Serve = Callable[..., str]
_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")


def words(page: str) -> str:
    """What a page says, without its markup."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


@dataclass(frozen=True)
class Site:
    """The pages of ``gymdata view`` over some paths. ``query``: what stands behind the question mark of the address."""

    client: TestClient

    def get(self, address: str, headers: Mapping[str, str] | None = None, **query: Any) -> Any:
        return self.client.get(address, headers=headers, params=query or None)

    def page(self, address: str, **query: Any) -> str:
        return str(self.get(address, **query).text)

    def says(self, address: str, **query: Any) -> str:
        """What the main part of a page says."""
        return words(self.page(address, **query).partition("<main")[2].partition("</main>")[0])


Open = Callable[..., Site]


#: What acts in a page, in a terminal or in a template, where it is not text.
HOSTILE = (
    '</script><script>window.hit=1</script><img src=x onerror="window.hit=2"><svg onload="window.hit=3">'
    "\x1b[31mred\x1b]0;title\x07\u202e\"'`</textarea>{{7*7}}"
)
#: A rollout whose second prompt does not go on from its first turn.
BROKEN = [([1, 20], [10, 11, 2]), ([1, 20, 10, 99, 2, 30], [40, 2])]


def judged(run: Path, *verdicts: tuple[int, int, float | None, float | None], **columns: Any) -> None:
    """What a judge said of rollouts of the task "a" beside their run: which two, and the score of each."""
    rows = [
        {
            "comparison_id": f"{i}-{j}", "group_id": "group-a", "task_id": "a", "rollout_i": f"a-{i}", "rollout_j": f"a-{j}",
            "response_i": i, "response_j": j, "judge_idx": 0, "score_1": first, "score_2": second,
            "ranking": None if first is None or second is None else 3.5 - (first - second) / 2,
            "status": "failed" if first is None else "judged", "raw": f"raw of {i}-{j} {HOSTILE}", "judge": "tiny",
            "run_id": "r", **columns,
        }
        for i, j, first, second in verdicts
    ]  # fmt: skip
    folder = run / "judge-tiny"
    write_table(pa.Table.from_pylist(rows, COMPARISONS.schema), folder / "comparisons.parquet", COMPARISONS)
    (folder / "run.json").write_text('{"stage": "judge", "parents": [{"path": ".."}]}')


def training(folder: Path, stage: str, rows: list[dict[str, Any]], **facts: Any) -> Path:
    """What a trainer leaves: run.json and a line for each step."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"stage": stage, **facts}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four rollouts of a task, with rewards 1, 0, 1, 0, and what a judge said of them; two of another."""
    rows = [rollout("a", k, float(k % 2 == 0), two_turns(20, 40 + k)) for k in range(4)]
    folder = write_run(tmp_path / "run", [*rows, *(rollout("b", k, 0.5, two_turns(21, 50)) for k in range(2))])
    # Right in both positions, the first position both times, equals called equal, and a failure.
    judged(folder, (0, 1, 5, 1), (1, 0, 1, 5), (2, 3, 5, 1), (3, 2, 5, 1), (0, 2, 3, 3), (1, 3, None, None))
    return folder


@pytest.fixture
def site() -> Open:
    """``site(PATH, …, setting=value)``: the pages over the paths, answered without a server."""

    def opened(*paths: Path, **settings: Any) -> Site:
        inner = [one for path in paths for one in expanded(Path(path))]
        app = create_app(inner, ViewConfig.load(overrides=settings))
        return Site(TestClient(app, base_url="http://127.0.0.1"))

    return opened


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """``serve(PATH, …, setting=value)``: the base URL of ``gymdata view`` over the paths. ``tmp_path`` is named because the
    folder of a test that passed is removed: after its server, whose open page may still ask for something."""
    import uvicorn

    with contextlib.ExitStack() as stack:

        def start(*paths: Path, **settings: Any) -> str:
            inner = [one for path in paths for one in expanded(Path(path))]
            app = create_app(inner, ViewConfig.load(overrides=settings))
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
        program = next(filter(None, map(shutil.which, _NAMES)), own if Path(own).is_file() else None)
        if program is None:
            pytest.skip("no Chromium is installed: `apt-get install chromium`, or `playwright install chromium`")
        # Root, as in a container, has no sandbox.
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, serve: Serve) -> Iterator[Any]:
    """A page, closed before its server ends. Errors in its console, and requests to elsewhere, fail the test."""
    context = chromium.new_context(viewport={"width": 1280, "height": 720})
    page = context.new_page()
    faults: list[str] = []
    hosts, visited = set[str](), set[str]()

    def requested(request: Any) -> None:
        hosts.add(request.url.partition("//")[2].partition("/")[0].partition(":")[0])
        if request.is_navigation_request():
            visited.add(request.url)

    def logged(message: Any) -> None:
        # A page that says what is wrong is answered with such a status.
        is_answer = "status of 4" in message.text and message.location["url"] in visited
        if message.type in ("error", "warning") and not is_answer:
            faults.append(f"{message.text} ({message.location['url']})")

    page.on("console", logged)
    page.on("pageerror", lambda error: faults.append(f"uncaught: {error}"))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", requested)
    page.set_default_timeout(30_000)
    yield page
    context.close()
    assert not faults
    assert hosts <= {"127.0.0.1", ""}
