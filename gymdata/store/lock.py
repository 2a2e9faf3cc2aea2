"""One writer a run: a lock on RUN/lock that dies with its process, and what names its holder.

Invariants: the lock is the kernel's, not the file's existence, so a killed writer leaves nothing to clean up; where a
file system has no such locks, there is an error. A forked child does not hold its parent's lock.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from gymdata.errors import StoreError
from gymdata.store.paths import refuse_unwritable

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = "lock"


def claim(path: Path, *, wait: bool = False) -> FileLock:
    """Lock ``path`` for this process, made if missing, until its ``release``, by any thread. Raises TimeoutError when
    another process holds it (without ``wait``) or has just renamed it, OSError when it cannot be made or is a link."""
    from filelock import FileLock  # Late: commands that only read lock nothing.

    def refuse_renamed(fd: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return
        raise TimeoutError(str(path))

    path.parent.stat()  # FileLock would make the folder.
    lock = FileLock(
        path, timeout=-1 if wait else 0, thread_local=False, fallback_to_soft=False, on_acquired=refuse_renamed
    )
    lock.acquire()
    return lock


class Lock:
    """Held from construction until ``release``. Raises StoreError naming the holder, StoreError.from_os when
    nothing can be written there; a lock file that was made for it is removed again. ``wait``: wait for the holder instead
    of raising."""

    def __init__(self, folder: Path, name: str = LOCK, *, wait: bool = False) -> None:
        self._path = folder / name
        is_new = not self._path.exists()
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": started}
        try:
            self._lock = claim(self._path, wait=wait)
        except TimeoutError as error:
            raise _locked(folder, self._path) from error
        except OSError as error:
            raise StoreError.from_os(self._path, error) from error
        try:
            self._path.write_bytes(orjson.dumps(holder))
        except OSError as error:
            if is_new:
                self._path.unlink(missing_ok=True)
            self._lock.release()
            raise StoreError.from_os(self._path, error) from error

    def release(self) -> None:
        """Release the lock. The file stays, because other processes may be opening it."""
        if self._lock.is_locked:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(self._path, 0)
            self._lock.release()

    def remove(self) -> None:
        """Release the lock and remove its file. Processes that opened the file before find out."""
        if self._lock.is_locked:
            self._path.unlink(missing_ok=True)
        self._lock.release()


def refuse_held(folder: Path) -> None:
    """Raise StoreError when another process writes to ``folder``; nothing is made there."""
    path = folder / LOCK
    with contextlib.suppress(OSError):
        # FileLock would make the file, and needs the right to write it. A pipe of that name would block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _locked(folder, path) from error
        finally:
            os.close(fd)


def is_held(folder: Path) -> bool:
    """Whether a process, this one too, writes to ``folder`` now."""
    try:
        refuse_held(folder)
    except StoreError:
        return True
    return False


def sync(path: Path) -> None:
    """Bring to the disk what was written to a file, or the names that were created, renamed or removed in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[Path]:
    """``folder``, made on the disk if missing, and removed again if it stays empty, with the folders above it that were
    missing. Raises StoreError.from_os, and as ``refuse_unwritable``."""
    refuse_unwritable(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync(path.parent)
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()


def holder_of(path: Path) -> dict[str, object]:
    """The process that holds the lock ``path``, or held it and was killed: ``pid``, ``host`` and ``since``. Empty for a
    released lock, and for a file that is not a lock."""
    try:
        holder = orjson.loads(path.read_bytes() if path.is_file() else b"")
    except (OSError, orjson.JSONDecodeError):
        return {}
    return holder if isinstance(holder, dict) and holder.keys() >= {"pid", "host", "since"} else {}


def _locked(folder: Path, lock: Path) -> StoreError:
    return StoreError(f"{folder}: another process writes to this run ({_describe(lock)})")


def _describe(path: Path) -> str:
    holder = holder_of(path)
    return f"pid {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else "holder not known"
