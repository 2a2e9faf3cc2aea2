"""The pages of ``gymdata view`` as an ASGI application.

Invariants: what comes from data is escaped where it is put into a page, and nothing of it is run: scripts and styles come
from this server only (no ``unsafe-*``), a page loads nothing from anywhere else; a request that names another machine, or
comes from another site's script, is refused; a file that cannot be read gives a page that says so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from gymdata.checks.violations import CODES
from gymdata.commands.view.answers import Missing
from gymdata.commands.view.pages import Pages
from gymdata.commands.view.settings import ViewConfig
from gymdata.errors import GymdataError, counted, printable
from gymdata.errors import shown as by_url
from gymdata.urls import OnlyHosts

HERE = Path(__file__).resolve().parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Guarded:
    """ASGI middleware: every answer carries the security headers; scripts of other sites get none."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((k, v) for k, v in _HEADERS.items() if k not in names)]
            await send(message)

        sent = dict(scope["headers"])
        foreign = sent.get(b"sec-fetch-site", b"none") in (b"cross-site", b"same-site")
        if foreign and sent.get(b"sec-fetch-mode") != b"navigate":
            await PlainTextResponse("this page's own scripts only\n", 403)(scope, receive, sending)
            return
        await self.app(scope, receive, sending)


def create_app(paths: Sequence[Path], config: ViewConfig) -> Any:
    """The application over ``paths``."""
    pages = Pages(paths, config)
    templates = environment()

    def page(make: Callable[[Request], tuple[str, dict[str, Any]]]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            status = 200
            try:
                name, values = make(request)
            except Missing as missing:
                name, values, status = "error.html", {"title": "Not here", "message": str(missing)}, 404
            except (GymdataError, OSError) as error:
                name, values, status = "error.html", {"title": "This cannot be shown", "message": str(error)}, 422
            values |= pages.around(request, bare="fragment" in request.query_params)
            return HTMLResponse(templates.get_template(name).render(values), status)

        return answer

    routes: list[BaseRoute] = [Route(path, page(make)) for path, make in pages.html().items()]
    routes += [Route(path, make) for path, make in pages.data().items()]
    routes.append(Mount("/static", StaticFiles(directory=HERE / "static")))

    def unknown(request: Request, _: Exception) -> Response:
        values = {"title": "Not here", "message": f"there is no page {request.url.path}"} | pages.around(request)
        return HTMLResponse(templates.get_template("error.html").render(values), 404)

    def failed(request: Request, error: Exception) -> Response:
        line = f"error: {request.url.path}: unexpected {type(error).__name__}: {error}"
        sys.stderr.write(printable(line, lines=False) + "\n")
        return PlainTextResponse("unexpected error: the terminal says more\n", 500)

    # The data of the first page is read while the browser opens.
    threading.Thread(target=pages.tables.snapshot, name="gymdata-view-index", daemon=True).start()
    app = Starlette(routes=routes, exception_handlers={404: unknown, 500: failed})
    return OnlyHosts(Guarded(app), [config.host, *config.allow_host])


def environment(places: Mapping[str, Mapping[str, str]] | None = None) -> jinja2.Environment:
    """Templates that escape every value, and write what a terminal or browser would act on as an escape. ``places``: where
    rollouts, groups and comparisons are by id, if not on pages of their own."""
    from gymdata.commands.view import text
    from gymdata.commands.view.evidence import rendering

    def shown(value: Any) -> Any:
        # What is marked as HTML comes from the templates themselves.
        return text.visible(by_url(value)) if type(value) is str else value

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Any = (text.number, text.short, text.share, text.signed, text.ending, text.seconds)
    filters += (rendering.rendered, rendering.hits)
    env.filters |= {function.__name__: function for function in filters} | {"count": counted}
    env.globals["codes"] = CODES
    for name in ("rollout", "group", "comparison"):
        page = f"/{name}?id=%s"
        env.globals[f"{name}_href"] = partial(_href, page) if places is None else partial(_place, places[name])
    return env


def _href(page: str, key: str) -> str:
    return page % quote_plus(key)


def _place(places: Mapping[str, str], key: str) -> str:
    return places.get(key, "")
