"""vLLM servers that ``gymdata serve --background`` started on this machine, and the one that samples a model.

Invariants: a server is used only while its process lives and answers, for the same weights and engine arguments; the file of
one that is gone is ignored; nothing is started here.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from gymdata.engines.servers.vllm_process import answers
from gymdata.errors import UsageError
from gymdata.models.cache import cached
from gymdata.settings import Settings
from gymdata.store.run_json import write_json

_STOP_S, _POLL_S = 10.0, 0.1
#: Process start times are read from a clock that may be corrected meanwhile.
_CLOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class BackgroundServer:
    """``name``: of the model for clients; ``model``: its absolute path or hub name; ``engine``: arguments that were given;
    ``pid``: leads a process group of its own; ``started``: seconds since the epoch."""

    url: str
    name: str
    model: str
    policy_hash: str
    engine: Settings
    pid: pydantic.PositiveInt
    started: float
    log: str

    @property
    def file(self) -> Path:
        """The file that describes it. A home folder may be on several machines."""
        return cached("servers", f"{platform.node()}-{self.pid}.json")

    def is_of(self, model: str) -> bool:
        """Whether it was started with this folder or name."""
        return self.model in (model, os.path.realpath(model))

    def save(self) -> None:
        """Write the file."""
        write_json(self.file, asdict(self))

    def remove(self) -> None:
        """Remove the file and the log."""
        self.file.unlink(missing_ok=True)
        Path(self.log).unlink(missing_ok=True)

    def is_alive(self) -> bool:
        """Whether its process, and not another with the same number, is there."""
        import psutil

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            same = bool(abs(process.create_time() - self.started) < _CLOCK_S)
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False

    def stop(self) -> None:
        """End its processes and remove its files."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The group: its engine processes may outlive the server.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            deadline = time.monotonic() + _STOP_S
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self.remove()


def background_servers() -> list[BackgroundServer]:
    """Those that are alive, in the order of their start."""
    servers, described = [], pydantic.TypeAdapter(BackgroundServer)
    for file in cached("servers").glob(f"{platform.node()}-*.json"):
        # A file of another version, a damaged one, or one that was removed meanwhile.
        with contextlib.suppress(OSError, ValueError):
            servers.append(described.validate_json(file.read_bytes()))
    return sorted((server for server in servers if server.is_alive()), key=lambda server: server.started)


def background_server(
    model: str, policy_hash: str, engine: Settings, deciding: Sequence[str]
) -> tuple[BackgroundServer | None, list[str]]:
    """The server that samples ``model`` as an engine here with these arguments would, and the note that says so, or why
    servers of the model are not used. ``deciding``: arguments that must be equal also where ``engine`` has none."""
    notes = []
    for server in background_servers():
        if server.policy_hash != policy_hash and not server.is_of(model):
            continue
        differing = next((key for key in (*deciding, *engine) if engine.get(key) != server.engine.get(key)), None)
        if server.policy_hash != policy_hash:
            fault = "it has the weights that the folder had when it was started"
        elif differing is not None:
            running, here = (arguments.get(differing, "not set") for arguments in (server.engine, engine))
            fault = f"its engine.{differing} is {running}, here {here}"
        elif not answers(server.url):
            fault = "it does not answer"
        else:
            return server, [f"sampling from {server.url}, which `gymdata serve --background` started"]
        notes.append(f"not sampling from the background server on {server.url}: {fault}")
    return None, notes


def stop_servers(model: str) -> list[BackgroundServer]:
    """End the servers of ``model``, and return them; without a model the only one. Raises UsageError where there are none,
    or several to choose from."""
    servers = background_servers()
    stopped = [server for server in servers if not model or server.is_of(model)]
    if not stopped:
        others = ", ".join(f"{server.model} (process {server.pid})" for server in servers)
        named = model or "MODEL"
        hint = f"there are servers of {others}" if others else f"gymdata serve {named} --background starts one"
        raise UsageError(f"no background server{f' of {model}' if model else ''} on this machine", hint=hint)
    if not model and len(stopped) > 1:
        commands = dict.fromkeys(f"gymdata serve {shlex.quote(server.model)} --stop" for server in stopped)
        raise UsageError(
            f"{len(stopped)} background servers on this machine, and no model is named", hint="; ".join(commands)
        )
    for server in stopped:
        server.stop()
    return stopped
