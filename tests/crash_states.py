"""What a power cut can leave: every state of the files below a folder that POSIX allows at each moment of a recording.

The operations of this process on files below a folder are recorded in memory: what was created, written, renamed, removed
and synced, in order. At each moment the content of a file is certain up to its last sync, and the names in a folder up to
that folder's; of later operations any subset may have reached the disk, and of what was written later all, nothing, a half,
or a block of zeros of the right length. A kill without a power cut is the state in which everything has.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import random
import shutil
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gymdata.store.reading import DataWarning

#: A folder by name: the content of a file, or another folder.
Tree = dict[str, Any]

#: Audit events of what changes files. Writes have none: they are seen before the next event.
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Write:
    """A file's content is another."""

    file: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Named:
    """A file or folder got the ``name`` in ``folder``; ``was``: the folder and name that it had before, if any."""

    thing: int
    folder: int
    name: str
    was: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """A name in a folder is gone."""

    folder: int
    name: str


@dataclass(frozen=True, slots=True)
class Synced:
    """A file's content, or the names in a folder, are on the disk."""

    thing: int


@dataclass(frozen=True, slots=True)
class Promised:
    """From here on ``what`` must survive."""

    what: Any


Operation = Write | Named | Removed | Synced | Promised
Change = Named | Removed


@dataclass(slots=True)
class Recording:
    """Operations below ``root``, whose files of before are on the disk. ``unlocked``: names of files that changed while
    ``held`` was false."""

    root: Path
    held: Callable[[], bool] = lambda: True
    operations: list[Operation] = field(default_factory=list)
    #: How many operations tell of what was there before.
    n_before: int = 0
    unlocked: set[str] = field(default_factory=set)
    #: At the last look: object by inode, content by file, and names by folder.
    _objects: dict[int, int] = field(default_factory=dict)
    _contents: dict[int, bytes] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=lambda: {_ROOT: {}})
    _versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _opened: ExitStack = field(default_factory=ExitStack)

    def promise(self, what: Any) -> None:
        """Whoever asked for ``what`` was told that it is kept."""
        with self._lock:
            self.look()
            self.operations.append(Promised(what))

    def sync(self, file: int) -> None:
        """In place of ``os.fsync``."""
        with self._lock:
            self.look()
            if (thing := self._objects.get(os.fstat(file).st_ino)) is not None:
                self.operations.append(Synced(thing))

    def look(self) -> None:
        """Record what changed since the last look: an operation at most, and what was written."""
        with self._lock:
            objects, contents = dict[int, int](), dict[int, bytes]()
            names: dict[int, dict[str, int]] = {}
            self._walk(self.root, _ROOT, objects, contents, names)
            before = {thing: (folder, name) for folder, found in self._names.items() for name, thing in found.items()}
            after = {thing: (folder, name) for folder, found in names.items() for name, thing in found.items()}
            writes = [Write(file, new) for file, new in contents.items() if self._contents.get(file) != new]
            named = [Named(thing, *now, before.get(thing)) for thing, now in after.items() if before.get(thing) != now]
            places = {(change.folder, change.name) for change in named}
            gone = [place for thing, place in before.items() if thing not in after and place not in places]
            removed = [Removed(*place) for place in gone if place[0] in names]
            if (writes or named or removed) and not self.held():
                self.unlocked |= {after[write.file][1] for write in writes} | {
                    change.name for change in named + removed
                }
            self.operations += [*writes, *named, *removed]
            self._objects, self._contents, self._names = objects, contents, names

    def _walk(self, path: Path, folder: int, objects: dict[int, int], contents: dict[int, bytes], names: Any) -> None:
        objects[path.stat().st_ino] = folder
        inside: dict[str, int] = names.setdefault(folder, {})
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            try:
                inode = entry.inode()
                thing = self._objects.get(inode)
                if thing is None:
                    thing = next(self._numbers)
                    # While it is open, its inode is not given to another file.
                    self._opened.callback(os.close, os.open(entry.path, os.O_RDONLY))
                if entry.is_dir():
                    self._walk(Path(entry.path), thing, objects, contents, names)
                else:
                    found = entry.stat()
                    version = found.st_size, found.st_mtime_ns
                    known = self._contents.get(thing) if self._versions.get(thing) == version else None
                    contents[thing] = Path(entry.path).read_bytes() if known is None else known
                    self._versions[thing] = version
            except FileNotFoundError:
                continue  # another thread has just removed it
            objects[inode], inside[entry.name] = thing, thing

    def moments(self) -> Iterator[Tree]:
        """The files after each operation, as a kill without a power cut leaves them."""
        disk = _Disk()
        for number, operation in enumerate(self.operations):
            if not isinstance(operation, Promised):
                disk.do(operation)
                if number >= self.n_before:
                    yield next(disk.left(2, random.Random(0)))

    def states(self, most: int = 64, seed: int = 0) -> Iterator[tuple[Tree, list[Any]]]:
        """(files, promises) after each operation; each once. Of more than ``most`` states at one moment that many are drawn,
        with those that lost all and nothing."""
        rng, disk, seen, promises = random.Random(seed), _Disk(), set[tuple[Any, int]](), list[Any]()
        for number, operation in enumerate(self.operations):
            if isinstance(operation, Promised):
                promises.append(operation.what)
            else:
                disk.do(operation)
            for tree in disk.left(most, rng) if number >= self.n_before else ():
                key = _key(tree), len(promises)
                if key not in seen:
                    seen.add(key)
                    yield tree, list(promises)


def _is_note(name: str) -> bool:
    """Whether nobody relies on the content: states that differ in it alone are one."""
    return name == "lock" or name.startswith("gymdata.log")


@dataclass(slots=True)
class _Disk:
    """What is certainly on a disk, and what may be."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {_ROOT: {}})
    #: By file: what was synced last, and what was written last.
    synced: dict[int, bytes] = field(default_factory=dict)
    written: dict[int, bytes] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def do(self, operation: Write | Named | Removed | Synced) -> None:
        if isinstance(operation, Write):
            self.written[operation.file] = operation.content
            self.synced.setdefault(operation.file, b"")
        elif isinstance(operation, Synced):
            if operation.thing in self.written:
                self.synced[operation.thing] = self.written[operation.thing]
            for change in [change for change in self.pending if operation.thing in _folders_of(change)]:
                assert _apply(change, self.names), change
                self.pending.remove(change)
        elif _is_note(operation.name):
            _apply(operation, self.names)
        else:
            self.pending.append(operation)

    def left(self, most: int, rng: random.Random) -> Iterator[Tree]:
        """What a power cut now may leave."""
        notes = {thing for found in self.names.values() for name, thing in found.items() if _is_note(name)}
        open_files = [file for file, now in self.written.items() if now != self.synced[file] and file not in notes]
        choices: list[list[Any]] = [[True, False] for _ in self.pending]
        choices += [_contents(self.synced[file], self.written[file]) for file in open_files]
        size = 1
        for options in choices:
            size *= len(options)
        drawn = itertools.product(*choices)
        if size > most:
            ends = ([options[0] for options in choices], [options[-1] for options in choices])
            drawn = iter([*ends, *([rng.choice(options) for options in choices] for _ in range(most))])  # type: ignore[assignment]  # lists in place of tuples
        for chosen in drawn:
            names = copy.deepcopy(self.names)
            kept = [change for change, is_kept in zip(self.pending, chosen, strict=False) if is_kept]
            # No disk has a folder in the place of one that is not empty: the earlier change is there, too.
            if all(_apply(change, names) for change in kept):
                contents = self.written | dict(zip(open_files, chosen[len(self.pending) :], strict=True))
                yield _tree(_ROOT, names, contents)


def _contents(before: bytes, after: bytes) -> list[bytes]:
    """What may be there of a file that was written after its last sync: all, a half of what is new, the other half behind
    zeros, zeros, or nothing."""
    same = len(before) if after.startswith(before) else 0
    middle, new = same + (len(after) - same) // 2, len(after) - same
    halves = [after[:middle], after[:same] + bytes(middle - same) + after[middle:]]
    return list(dict.fromkeys([after, *halves, after[:same] + bytes(new), before]))


def _folders_of(change: Change) -> set[int]:
    """A rename is in both folders or in none: it is on the disk when one of them is."""
    return {change.folder, change.was[0]} if isinstance(change, Named) and change.was else {change.folder}


def _apply(change: Change, names: dict[int, dict[str, int]]) -> bool:
    """Make one change; false where it could not have been made."""
    inside = names.setdefault(change.folder, {})
    if isinstance(change, Removed):
        inside.pop(change.name, None)
        return True
    there = inside.get(change.name)
    if there is not None and there != change.thing and names.get(there):
        return False
    if change.was is not None and names.get(change.was[0], {}).get(change.was[1]) == change.thing:
        del names[change.was[0]][change.was[1]]
    inside[change.name] = change.thing
    return True


def _tree(folder: int, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
    """Files and folders below one; a folder is what has had names in it or has no content."""
    found: Tree = {}
    for name, thing in sorted(names.get(folder, {}).items()):
        found[name] = contents[thing] if thing in contents else _tree(thing, names, contents)
    return found


def _key(tree: Tree) -> Any:
    return tuple((name, _key(inside) if isinstance(inside, dict) else inside) for name, inside in tree.items())


def put(tree: Tree, folder: Path) -> None:
    """Make ``folder`` hold these files."""
    folder.mkdir(parents=True)
    for name, inside in tree.items():
        if isinstance(inside, dict):
            put(inside, folder / name)
        else:
            (folder / name).write_bytes(inside)


_active: list[Recording] = []
_within = threading.local()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or getattr(_within, "now", False):
        return
    if event not in _CHANGES and not (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    # A name within an open folder is relative.
    elsewhere = isinstance(arguments[0], (str, os.PathLike)) and Path(arguments[0]).is_absolute()
    if elsewhere and not Path(arguments[0]).is_relative_to(_active[-1].root):
        return
    _within.now = True
    try:
        _active[-1].look()
    finally:
        _within.now = False


@contextmanager
def recording(root: Path, held: Callable[[], bool] = lambda: True) -> Iterator[Recording]:
    """Record the operations of this process below ``root``; nothing is synced meanwhile."""
    if not getattr(sys, "_hears_file_operations", False):
        sys.addaudithook(_heard)  # it cannot be removed
        sys._hears_file_operations = True  # type: ignore[attr-defined]  # this module may be loaded twice
    made = Recording(root)
    made.look()
    # What was there before is on the disk.
    for thing in [*made._names, *made._contents]:
        made.operations.append(Synced(thing))
    made.n_before = len(made.operations)
    made.held = held
    fsync, write = os.fsync, os.write

    def whole(file: int, data: Any) -> int:
        done = write(file, data)
        if Path(f"/proc/self/fd/{file}").readlink().is_relative_to(root):
            made.look()
        return done

    os.fsync, os.write = made.sync, whole
    _active.append(made)
    try:
        yield made
        made.look()
    finally:
        _active.remove(made)
        made._opened.close()
        os.fsync, os.write = fsync, write


def wrong_states(
    made: Recording, folder: Path, fault: Callable[[Path, list[Any]], str | None], most: int = 8
) -> tuple[int, list[str]]:
    """How many states of a recording were tried in ``folder``, and what was wrong in some. ``fault``: says, of the files in
    a folder and what was promised, what is wrong for the next command; None if nothing."""
    tried, wrong = 0, list[str]()
    for tree, promises in made.states(most):
        shutil.rmtree(folder, ignore_errors=True)
        put(tree, folder)
        with warnings.catch_warnings():
            # A torn line is named, as it should be.
            warnings.simplefilter("ignore", DataWarning)
            try:
                found = fault(folder, promises)
            except Exception as error:  # noqa: BLE001 - whatever the next command ends with
                found = f"{type(error).__name__}: {error}"
        tried += 1
        if found:
            wrong.append(f"{found}; promised: {promises}; left: {_outline(tree)}")
    return tried, wrong


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, before: str, after: str) -> None:
    """Let a function of a module or class be what it is with ``after`` in the place of ``before``."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(before) == 1, f"{name} has no single {before!r}"
    made: dict[str, Any] = {}
    module = inspect.getmodule(owner)
    exec(source.replace(before, after), vars(module), made)
    patch.setattr(owner, name, made[name])


def _outline(tree: Tree) -> list[Any]:
    return [
        [name, _outline(inside)] if isinstance(inside, dict) else f"{name} ({len(inside)})"
        for name, inside in tree.items()
    ]
