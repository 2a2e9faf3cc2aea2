"""Progress of a running command, and the log of a run folder.

The log has the command, what it printed on stderr, and how it ended, each line with its time and level. Invariants: the
log is not part of a run: not of its file list, hash, identity, resume or export; a command never fails because of its
log; nothing is written to a folder before it is an output; secrets of URLs are not in it.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import re
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
#: Above every level.
_OFF = logging.CRITICAL + 1
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


class _Line(logging.Formatter):
    """One record as lines that are safe to print and hold no secrets."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 - as logging calls it
        return dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


class _Early(logging.Handler):
    """Keeps the records until there is a folder; the first one names the command."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=1_000)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


_early = _Early()


class _File(logging.FileHandler):
    """The log of one folder, and the one before it; never through a link. A library that configures logging (vLLM) closes
    every handler: this one opens its file again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOG, "a", "utf-8", delay=True, errors="backslashreplace")
        self.setLevel(_early.level)
        self.setFormatter(_Line("%(asctime)s %(levelname)-7s %(message)s"))
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
            if self.stream is not None and os.fstat(self.stream.fileno()).st_size > _MAX_BYTES:
                self.close()
                self.folder.joinpath(LOG).replace(self.folder / f"{LOG}.1")
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - as logging calls it
        """A log that cannot be written is closed; the command continues."""
        self.setLevel(_OFF)
        error = sys.exc_info()[1]
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write(printable(f"warning: {self.baseFilename}: {reason}; this command writes no log\n"))

    def _open(self) -> TextIOWrapper:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=opener)


def start_logging(level: Level | None, *, verbose: bool = False) -> None:
    """Send the records of gymdata to stderr and to the folders that ``log_to`` names, from now on.

    ``level``: of both; without one, stderr has warnings (with ``verbose`` everything) and the files have ``info`` and above.
    """
    stop_logging()
    console = logging.StreamHandler()
    console.setLevel((level or ("debug" if verbose else "warning")).upper())
    console.setFormatter(_Line("%(message)s"))
    # Printed records go to the files alone.
    console.addFilter(lambda record: not getattr(record, "printed", False))
    _early.records.clear()
    _early.setLevel((level or "info").upper())
    _LOGGER.handlers = [console, _early]
    _LOGGER.setLevel(min(console.level, _early.level))
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


def log_to(folder: Path) -> None:
    """From now on records also go to this folder's log, with those before the first folder. No effect where no command
    configured logging."""
    folder, logs = folder.resolve(), _logs()
    if folder in logs or not (logs or _early in _LOGGER.handlers):
        return
    files = [path for name in LOG_FILES if (path := folder / name).is_file() and not path.is_symlink()]
    attempts = [int(number) for path in files for number in _ATTEMPT.findall(path.read_bytes())]
    began = f"attempt {max(attempts, default=0) + 1}, process {os.getpid()}"
    first = logging.makeLogRecord({"levelno": logging.INFO, "levelname": "INFO", "msg": began})
    first.created = _early.records[0].created if _early.records else first.created
    log = _File(folder)
    log.emit(first)
    for record in _early.records:
        if record.levelno >= log.level:
            log.emit(record)
    _LOGGER.removeHandler(_early)
    _LOGGER.addHandler(log)


def leave_log(folder: Path) -> None:
    """Stop logging to a folder; later records go to the command's own folder, which is the first."""
    logs = _logs()
    log = logs.get(folder.resolve())
    if log is not None and log is not next(iter(logs.values())):
        _LOGGER.removeHandler(log)
        log.close()


def _logs() -> dict[Path, _File]:
    return {handler.folder: handler for handler in _LOGGER.handlers if isinstance(handler, _File)}
