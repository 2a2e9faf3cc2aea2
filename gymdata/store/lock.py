"""One writer a run: a lock on RUN/lock that dies with its process.

What always holds: the lock is the kernel's, not the file's existence, so a killed writer leaves nothing to clean up; a
forked child drops its copy at once, so an engine process that outlives its parent does not hold it.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import weakref
from pathlib import Path

import orjson

from gymdata.errors import StoreError

LOCK = "lock"
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Held from construction until ``release``. Raises StoreError.locked naming the holder."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _describe(os.pread(self._fd, 4096, 0))
            os.close(self._fd)
            raise StoreError.locked(folder, holder) from error
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, orjson.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": started}), 0)
        _held.add(self)

    def release(self) -> None:
        """Give the run free. The file stays: removing it would let two writers lock different files."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            # Unlocking frees every copy of this descriptor, also one that a child forked just now has not yet closed.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close this process's copy without touching the lock's content."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _held.discard(self)


def _describe(content: bytes) -> str:
    try:
        holder = orjson.loads(content)
        return f"pid {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "holder not known"


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
