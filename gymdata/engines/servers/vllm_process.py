"""A vLLM server as a process of this command: the line that starts it, and its life until it is stopped.

Invariants: the line is all there is to it, so that people can start the same server themselves; no process of it outlives
this one, however this one ends (on Linux), unless it is to stay; what ends it early is raised with how it ended.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gymdata.engines.parent_death import ENGINE_OF, dies_with
from gymdata.errors import OutsideError
from gymdata.settings import Settings
from gymdata.workers import python_module
from gymdata.workers.signals import how_ended

#: ``vllm serve`` of the CPU build looks for metadata of another package and crashes; the module is the same server.
MODULE = "vllm.entrypoints.openai.api_server"
_POLL_S, _STOP_S, _HEALTH_S = 0.25, 5.0, 5.0
_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}


def words_of(arguments: Settings) -> list[str]:
    """Engine arguments as the server's flags: ``max_model_len=8`` is ``--max-model-len 8``, False is ``--no-…``."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def shell_line(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The line to type, with the variables that it needs; broken before flags with a backslash."""
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines = [" ".join([*assignments, shlex.quote(python), "-m", MODULE])]
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(shlex.quote(word))
    for flag in map(" ".join, flags):
        if len(lines[-1]) + len(flag) < 100:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"    {flag}")
    return " \\\n".join(lines)


@contextlib.contextmanager
def running(
    words: Sequence[str], environment: Mapping[str, str], log: Path, *, stays: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a process, which is gone afterwards with all of its own. ``log`` gets what it prints, and stays when it
    ended by itself. ``stays``: after a context that ends without an error the server and its log are left, and this process
    may end."""
    parent = os.getpid()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*python_module(MODULE), *words],
            # What the user set wins over what keeps the log short.
            env={**_QUIET, **os.environ, **environment, ENGINE_OF: str(parent)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=None if stays else dies_with(parent),
        )
    stopped, left = True, False
    try:
        yield process
        left = stays
    except OutsideError:
        stopped = False
        raise
    finally:
        for number in () if left else (signal.SIGTERM, signal.SIGKILL):
            # The whole group: its engine processes may be there when the server itself is not.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        if stopped and not left:
            log.unlink(missing_ok=True)


def answers(url: str) -> bool:
    """Whether a server is ready for requests."""
    # What is no URL, or no answer of HTTP, is no OSError.
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_S).close()
        return True
    return False


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when the server answers. Raises OutsideError("engine") when it ends before."""
    while process.poll() is None:
        if answers(url):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    raise ended(process, log)


def ended(process: subprocess.Popen[bytes], log: Path) -> OutsideError:
    """The server ended by itself."""
    hint = f"{log} says why. Too little memory? Lower engine.gpu_memory_utilization or engine.max_model_len"
    return OutsideError("engine", f"the vLLM server {how_ended(process.returncode)}", hint=hint, fatal=True)
