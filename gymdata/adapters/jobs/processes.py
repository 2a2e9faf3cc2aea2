"""Child processes of the finetuning loop: one of gymdata's commands, or a trainer of the user's.

What always holds: a child ends when the loop's process ends, however that ends, so that the loop started again finds
nobody at work in its folders; what a child says for people is in its log; its failure carries its last words.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gymdata.adapters.children import OWN_GROUP, interruptions_passed_to
from gymdata.config.urls import placeholder_values
from gymdata.errors import EXIT_INTERRUPTED, GymdataError
from gymdata.ports import Progress
from gymdata.store.reading import child_environment

#: Becomes the command after asking Linux to end it with its parent; a parent that is gone already is noticed.
_LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.5
_TAIL_LINES = 14
_TAIL_BYTES = 16_384


def gymdata_words(words: Sequence[str]) -> list[str]:
    """The command line of one of gymdata's own commands."""
    return [sys.executable, "-m", "gymdata_cli", *words]


def start(
    words: Sequence[str],
    log: Path,
    *,
    stdout: int | IO[Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``words`` so that they end with this process. Their stderr, and stdout unless it is given, are added to ``log``.

    To be called from the main thread: Linux ends a child with the thread that started it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as noise:
        return subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _LAUNCH, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=noise if stdout is None else stdout,
            stderr=noise,
            env={**os.environ, **child_environment(), **placeholder_values(), **(environment or {})},
            **OWN_GROUP,
        )


def wait(process: subprocess.Popen[bytes], log: Path, progress: Progress, timeout_s: float | None = None) -> int:
    """The exit code, once it has ended; ``progress`` hears the log's last line meanwhile. Ctrl-C is passed on
    to the child. Raises subprocess.TimeoutExpired."""
    left = timeout_s
    with interruptions_passed_to(process):
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                hear(log, progress)
                if left is not None and (left := left - _POLL_S) <= 0:
                    raise


def hear(log: Path, progress: Progress) -> None:
    """Pass on how far the log's last line says that the work is, as in ``training 12/40``."""
    lines = last_lines(log, 1)
    if lines and (found := re.search(r"(\d[\d,]*)/(\d[\d,]*)", lines[-1])):
        done, total = (int(number.replace(",", "")) for number in found.groups())
        progress.update(done=done, total=total)


class CommandRunner:
    """Runs gymdata's commands (implements ports.Commands)."""

    def run(self, words: Sequence[str], log: Path, progress: Progress) -> Mapping[str, Any]:
        """``gymdata WORDS --json``; what it printed, with ``exit_code`` (0, or 1: faults found).

        Raises KeyboardInterrupt after a Ctrl-C, and a GymdataError with the command's exit code when it said nothing.
        """
        answer = log.with_suffix(".out")
        answer.parent.mkdir(parents=True, exist_ok=True)
        with answer.open("wb") as out:
            process = start(gymdata_words([*words, "--json"]), log, stdout=out)
        code = wait(process, log, progress)
        text = answer.read_text(errors="replace").strip()
        answer.unlink()
        if code in (EXIT_INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        if code not in (0, 1) or not text:
            raise failed(f"`gymdata {words[0]}`", code, log)
        printed = json.loads(text.splitlines()[-1])
        return {**printed, "exit_code": code} if isinstance(printed, dict) else {"exit_code": code, "value": printed}


def failed(what: str, code: int, log: Path) -> GymdataError:
    """The error of a child that ended with ``code``; its exit code is the child's (3 when a signal ended it)."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said = "\n".join(f"    {line}" for line in last_lines(log))
    error = GymdataError(f"{what} {how}" + (f":\n{said}" if said else ""), hint=f"the whole log is {log}")
    error.exit_code = code if code > 0 else 3
    return error


def last_lines(log: Path, n: int = _TAIL_LINES) -> list[str]:
    """The last ``n`` lines of a log that are not empty."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-n:]
