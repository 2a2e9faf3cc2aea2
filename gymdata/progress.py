"""Progress of a running command, and the log of a run folder.

The log has the command, what it printed on stderr, and how it ended, each line with its time and level. Invariants: the
log is not part of a run: not of its file list, hash, identity, resume or export; a command never fails because of its
log; nothing is written to a folder before it is an output; secrets of URLs are not in it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import logging.handlers
import os
import re
import stat
import sys
from collections import deque
from io import TextIOWrapper
from pathlib import Path
from typing import Literal, Protocol

from gymdata.errors import printable, redacted

#: The file in a run folder, and the one before it.
LOG = "gymdata.log"
LOG_FILES = (LOG, f"{LOG}.1")
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")

_MAX_BYTES = 10_000_000
#: Lines kept for a folder that is no output yet; the first one names the command.
_KEPT = 1_000
_ATTEMPT = re.compile(rb"^\S+ INFO +attempt (\d+)", re.MULTILINE)
_LOGGER = logging.getLogger("gymdata")

#: Figures of a training: name of the count → (its label, its format).
FIGURES = {
    "loss": ("loss", ".4g"),
    "accuracy": ("accuracy", ".1%"),
    "margin": ("margin", ".3g"),
    "explained_variance": ("explained variance", ".3g"),
    "kl": ("KL", ".2g"),
    "learning_rate": ("lr", ".3g"),
    "grad_norm": ("grad", ".3g"),
}


class Progress(Protocol):
    """Receives the progress of a stage. Never raises.

    ``update`` takes running totals (done, total, tokens, failures, failed attempts, …) and the latest of ``FIGURES``; of
    what a training scores before its first step, ``scored`` and ``total``.
    """

    def update(self, **counts: float) -> None: ...

    def message(self, text: str) -> None: ...


class NullProgress:
    """Progress that is not shown (implements Progress)."""

    def update(self, **counts: float) -> None: ...

    def message(self, text: str) -> None: ...


def start_logging(level: Level | None, *, verbose: bool = False) -> None:
    """Send the records of gymdata to stderr and to the folders that ``log_to`` names, from now on.

    ``level``: of both; without one, stderr has warnings (with ``verbose`` everything) and the files have ``info`` and above.
    """
    stop_logging()
    console_level, file_level = level or ("debug" if verbose else "warning"), level or "info"
    console = logging.StreamHandler()
    console.setLevel(console_level.upper())
    console.setFormatter(_Line("%(message)s"))
    # Printed records go to the files alone.
    console.addFilter(lambda record: not getattr(record, "printed", False))
    _LOGGER.handlers = [console, _Folders(file_level.upper())]
    _LOGGER.setLevel(min(logging.getLevelNamesMapping()[name.upper()] for name in (console_level, file_level)))
    _LOGGER.propagate = False


def stop_logging() -> None:
    """Close what is open, and log nothing more."""
    for handler in _LOGGER.handlers[:]:
        _LOGGER.removeHandler(handler)
        handler.close()
    _LOGGER.setLevel(logging.NOTSET)
    _LOGGER.propagate = True


def printed(text: str, level: int = logging.INFO) -> None:
    """Record what a command has printed, which goes to the files alone."""
    if text.startswith("warning: "):
        text, level = text.removeprefix("warning: "), max(level, logging.WARNING)
    _LOGGER.log(level, "%s", text, extra={"printed": True})


def log_to(folder: Path, *, once: str = "run.json") -> None:
    """From now on records also go to this folder's log, as soon as the file ``once`` exists in it. No effect where no
    command configured logging."""
    for handler in _LOGGER.handlers:
        if isinstance(handler, _Folders):
            handler.add(folder, once)


def leave_log(folder: Path) -> None:
    """Stop logging to a folder; later records go to the command's own folder."""
    for handler in _LOGGER.handlers:
        if isinstance(handler, _Folders):
            handler.leave(folder)


class _Line(logging.Formatter):
    """One record as lines that are safe to print and hold no secrets."""

    default_msec_format = "%s.%03d"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 - as logging calls it
        return dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


class _Folders(logging.Handler):
    """Hands records to the log of each folder; those before the first folder wait for it."""

    def __init__(self, level: str) -> None:
        super().__init__(level)
        self._early: deque[logging.LogRecord] = deque(maxlen=_KEPT)
        self._files: dict[Path, _File] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if not self._files:
            self._early.append(record)
        for file in list(self._files.values()):
            file.handle(record)

    def add(self, folder: Path, once: str) -> None:
        folder = folder.resolve()
        with self.lock or contextlib.nullcontext():
            if folder not in self._files:
                self._files[folder] = _File(folder, once, self.level, self._early)
        self._files[folder].begin()

    def leave(self, folder: Path) -> None:
        folder = folder.resolve()
        with self.lock or contextlib.nullcontext():
            # The first is the command's own.
            if folder in self._files and folder != next(iter(self._files)):
                self._files.pop(folder).close()

    def close(self) -> None:
        # The folders stay: a library that configures logging (vLLM) closes every handler, and more records follow.
        for file in self._files.values():
            file.close()
        super().close()


class _File(logging.handlers.RotatingFileHandler):
    """The log of one folder, begun when the folder has the file ``once``; never through a link."""

    def __init__(self, folder: Path, once: str, level: int, early: deque[logging.LogRecord]) -> None:
        super().__init__(folder / LOG, maxBytes=_MAX_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.setLevel(level)
        self.setFormatter(_Line("%(asctime)s %(levelname)-7s %(message)s"))
        self._folder, self._once = folder, once
        self._waiting: deque[logging.LogRecord] | None = deque(early, maxlen=_KEPT)
        self._broken = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._broken:
            return
        if self._waiting is None:
            super().emit(record)
            return
        self._waiting.append(record)
        self.begin()

    def begin(self) -> None:
        """Write waiting records, once the folder is an output of gymdata."""
        if self._waiting is None or self._broken or not (self._folder / self._once).is_file():
            return
        waiting, self._waiting = self._waiting, None
        began = f"attempt {self._attempts() + 1}, process {os.getpid()}"
        first = {"levelno": logging.INFO, "levelname": "INFO", "msg": began}
        first |= {"created": waiting[0].created} if waiting else {}
        for record in (logging.makeLogRecord(first), *waiting):
            if not self._broken:
                super().emit(record)

    def close(self) -> None:
        self.begin()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - as logging calls it
        """A log that cannot be written is closed; the command continues."""
        self._broken = True
        error = sys.exc_info()[1]
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write(printable(f"warning: {self.baseFilename}: {reason}; this command writes no log\n"))

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.baseFilename, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(0, "is not a regular file")
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def _attempts(self) -> int:
        """How many attempts the log has, by its last one."""
        for name in LOG_FILES:
            with contextlib.suppress(OSError):
                descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(descriptor, "rb") as file:
                    if attempts := _ATTEMPT.findall(file.read(2 * _MAX_BYTES)):
                        return int(attempts[-1])
        return 0
