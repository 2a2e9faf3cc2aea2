"""``gymdata view``: a server for the browser on this machine, or one file that needs none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gymdata.commands.view.settings import ViewConfig
from gymdata.errors import DataError
from gymdata.public import paths_of
from gymdata.store.lineage import Paths
from gymdata.store.paths import RUN_JSON, find_run_json, read_facts
from gymdata.urls import LOOPBACK, address_of, listening_socket
from gymdata.workers.signals import sigterm_interrupts

#: How deep below a folder that is not a run runs are searched for.
_DEPTH = 4


def view(
    paths: Paths, *, config: ViewConfig | None = None, say: Callable[[str], None] = lambda _: None, **settings: Any
) -> None:
    """Serve pages about rollouts and what was made from them until a signal comes; with ``export`` write a file instead.

    ``paths``: run, stage and model folders, files and globs; a folder without a run.json means the runs in it.
    ``config`` is a ``ViewConfig``. ``say`` receives the address. Raises DataError when nothing is there, and
    OutsideError when the address is taken. KeyboardInterrupt ends it without an error.
    """
    config = ViewConfig.called_with(view, config, settings)
    roots = [root for path in paths_of(paths, "view") for root in expanded(Path(path))]
    if config.export is not None:
        from gymdata.commands.view.export import export

        say(export(roots, config))
        return
    import uvicorn

    from gymdata.commands.view.app import create_app

    with contextlib.ExitStack() as stack:
        app = create_app(roots, config)
        socket = stack.enter_context(contextlib.closing(listening_socket(config.host, config.port)))
        stack.enter_context(sigterm_interrupts())
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        if config.host not in LOOPBACK:
            say(f"anyone who can reach {config.host} can read these files: there is no login")
        say(f"open {address_of(socket)} (Ctrl-C ends)")
        uvicorn.Server(server_of(app)).run(sockets=[socket])


def server_of(app: Any) -> Any:
    """The settings of the server, which is quiet."""
    import uvicorn

    return uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


def expanded(path: Path) -> list[Path]:
    """``path``, or the runs inside it when it is a folder that is not a run itself. Raises DataError when nothing is
    there."""
    if not path.is_dir() or (path / RUN_JSON).exists() or (path.parent / RUN_JSON).exists():
        if not path.exists() and "*" not in str(path):
            raise DataError.missing_path(path)
        return [path]
    # The oldest first: the others are compared with it.
    runs = sorted(_runs_in(path, _DEPTH), key=_started_at)
    if not runs:
        raise DataError.not_a_run(path)
    return runs


def _started_at(path: Path) -> str:
    """When an output's first attempt began; what does not say comes last."""
    attempts = read_facts(run_json).get("attempts") if (run_json := find_run_json(path)) is not None else None
    return str(attempts[0].get("started_at")) if attempts else "~"


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    inner: Sequence[Path] = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    for path in inner:
        if (path / RUN_JSON).is_file():
            yield path
        elif depth > 1:
            yield from _runs_in(path, depth - 1)
