"""One writer a run: a lock on RUN/lock that dies with its process.

Invariants: the lock is the kernel's, not the file's existence, so a killed writer leaves nothing to clean up; a
forked child drops its copy at once, so an engine process that outlives its parent does not hold it.

filelock would not make this shorter: data files are locked themselves while they are written (``claim``), and a reader
looks for a writer without making a lock file (``refuse_held``), neither of which it does. Where a file system has no flock
it falls back to locks that a killed process leaves behind; here that is an error.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from gymdata.errors import StoreError

LOCK = "lock"
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Held from construction until ``release``. Raises StoreError.locked naming the holder, StoreError.from_os when
    nothing can be written there; a lock file that was made for it is removed again. ``wait``: wait for the holder instead
    of raising StoreError.locked; ``about``: more facts for the lock file, which ``holder_of`` returns, also after this
    process was killed."""

    def __init__(
        self, folder: Path, name: str = LOCK, *, wait: bool = False, about: Mapping[str, object] | None = None
    ) -> None:
        self._path = folder / name
        made = not self._path.exists()
        try:
            self._fd = claim(self._path, wait=wait)
        except BlockingIOError as error:
            raise StoreError.locked(folder, _describe(self._path)) from error
        except OSError as error:
            raise StoreError.from_os(self._path, error) from error
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": started}
        _held.add(self)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, orjson.dumps({**holder, **(about or {})}), 0)
        except OSError as error:
            if made:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            self.forget()
            raise StoreError.from_os(self._path, error) from error

    def release(self) -> None:
        """Release the lock. The file stays, because other processes may be opening it."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            # Unlocking frees every copy of this descriptor, also one that a child forked just now has not yet closed.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def remove(self) -> None:
        """Release the lock and remove its file. ``claim`` handles processes that opened the file before."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
        self.release()

    def forget(self) -> None:
        """Close this process's copy without touching the lock's content."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _held.discard(self)


def refuse_held(folder: Path, name: str = LOCK) -> None:
    """Raise StoreError.locked when another process writes to ``folder``; nothing is made there."""
    path = folder / name
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # A pipe of that name would block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError.locked(folder, _describe(path)) from error
        finally:
            os.close(fd)


def is_held(folder: Path, name: str = LOCK) -> bool:
    """Whether a process, this one too, writes to ``folder`` now."""
    try:
        refuse_held(folder, name)
    except StoreError:
        return True
    return False


@contextlib.contextmanager
def writing(target: Path, *, wait: bool = False) -> Iterator[None]:
    """Only this process writes ``target`` meanwhile. Its folder is made if missing, and removed again if it stays
    empty. Raises StoreError as Lock does."""
    with made_folder(target.parent) as folder:
        lock = Lock(folder, f".{target.name}.lock", wait=wait)
        try:
            yield
        finally:
            lock.remove()


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[Path]:
    """``folder``, made if missing, and removed again if it stays empty. Raises StoreError.from_os."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    try:
        yield folder
    finally:
        if made:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def claim(path: Path, *, wait: bool = False) -> int:
    """Lock ``path`` for this process, made if missing; returns its descriptor. A lock of a killed process is taken
    over. Raises BlockingIOError when another one holds it (without ``wait``), OSError when it cannot be made or is a
    symbolic link (ELOOP)."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Another process may have finished, and renamed or removed it, between the two.
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def holder_of(path: Path) -> dict[str, Any]:
    """The process that holds the lock ``path``, or held it and was killed: ``pid``, ``host``, ``since``, and what
    ``Lock`` got as ``about``. Empty for a released lock, and for a file that is not a lock."""
    try:
        holder = orjson.loads(path.read_bytes() if path.is_file() else b"")
    except (OSError, orjson.JSONDecodeError):
        return {}
    return holder if isinstance(holder, dict) and holder.keys() >= {"pid", "host", "since"} else {}


def _describe(path: Path) -> str:
    holder = holder_of(path)
    return f"pid {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else "holder not known"


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
