"""What a kill leaves: each state that the files of a command pass through, and of all its processes, as copies.

SIGKILL takes a process and leaves its files. So what a command finds after one is a copy of its files from that moment: a
command is run once, each state that is new is copied, and the same command runs over each copy. Beside it: a real
``gymdata collect`` that is killed at a chosen length of its journal, and a disk that is full.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import Forks, Spares, run_module

#: Audit events of what changes files. pyarrow's own writing has none, but what it writes to was made by ours before.
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

#: A file of the moment that is not as long as it is now: it was opened, and nothing was written yet.
Cut = tuple[Path, int]
Reached = Callable[[Cut | None], None]


def watch(root: Path, reached: Reached) -> None:
    """Call ``reached`` in this process at each moment below ``root`` when a kill would leave something else: before each
    change; of a file that is opened for writing also as if it had been opened, of what a journal appends also its half."""
    busy, within = threading.RLock(), threading.local()
    write = os.write

    def at(cut: Cut | None) -> None:
        if not getattr(within, "now", False):
            within.now = True
            try:
                with busy:
                    reached(cut)
            finally:
                within.now = False

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES and event != "open":
            return
        path = _place_of(event, arguments)
        if path is None or not path.is_relative_to(root):
            return
        if event in _CHANGES:
            at(None)
        elif arguments[2] & _WRITES:
            at(None)
            empties = arguments[2] & os.O_TRUNC and path.is_file() and path.stat().st_size
            if empties or (arguments[2] & os.O_CREAT and not path.exists()):
                at((path, 0))

    def half(file: int, data: Any) -> int:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if not path.is_relative_to(root):
            return write(file, data)
        at(None)
        done = write(file, data)
        at((path, path.stat().st_size - done // 2))
        return done

    sys.addaudithook(heard)
    # A sync is for a power cut, which a SIGKILL is not; it marks where a file is whole.
    os.fsync = lambda file: at(None)
    os.write = half
    _watch_weights(at)


def _place_of(event: str, arguments: tuple[Any, ...]) -> Path | None:
    """The path of what an audit event changes; a tree is removed by names within an open folder."""
    if not arguments or not isinstance(arguments[0], (str, os.PathLike)):
        return None
    name = Path(os.fspath(arguments[0]))
    folder = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}.get(event)
    if folder is not None and arguments[folder] >= 0:
        return Path(f"/proc/self/fd/{arguments[folder]}").readlink() / name
    return name


def _watch_weights(at: Reached) -> None:
    """torch and safetensors write past Python: their files are also seen half written."""
    written: list[tuple[Any, int]] = []
    if torch := sys.modules.get("torch"):
        written.append((torch.save, 1))
    if safetensors := sys.modules.get("safetensors.torch"):
        written.append((safetensors.save_file, 1))
    for function, place in written:

        def save(*given: Any, _function: Any = function, _place: int = place, **named: Any) -> Any:
            at(None)
            done = _function(*given, **named)
            path = given[_place] if len(given) > _place else named.get("filename", named.get("f"))
            if isinstance(path, (str, os.PathLike)):
                at((Path(path), Path(path).stat().st_size // 2))
            at(None)
            return done

        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is function:
                    setattr(module, name, save)


def _state(root: Path, cut: Cut | None) -> str:
    """Names and sizes: a file's bytes differ between two processes, by their ids and by the time."""
    found: dict[str, int | None] = {}
    for path in root.rglob("*"):
        # What another process moves away meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found[str(path)] = None if path.is_dir() else path.stat().st_size
    if cut is not None:
        found[str(cut[0])] = cut[1]
    return repr(sorted(found.items()))


class Copies:
    """Keeps a copy of ``root`` for each state that is new, in ``folder``; shared by processes."""

    def __init__(self, root: Path, folder: Path, role: str) -> None:
        self.root, self.folder, self.role = root, folder, role

    def __call__(self, cut: Cut | None) -> None:
        name = hashlib.blake2b(_state(self.root, cut).encode(), digest_size=12).hexdigest()
        place = self.folder / name
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            return
        # What another process moves away meanwhile was there a moment ago.
        with contextlib.suppress(shutil.Error):
            shutil.copytree(self.root, place / "files", symlinks=True, copy_function=self._keep)
        if cut is not None:
            copied = place / "files" / cut[0].relative_to(self.root)
            content = copied.read_bytes()[: cut[1]] if copied.exists() else b""
            copied.unlink(missing_ok=True)
            copied.write_bytes(content)
        frames = [f for f in traceback.extract_stack() if "/gymdata/" in f.filename and f.name != "<module>"]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
        cut_to = f", {cut[0].name} of {cut[1]} bytes" if cut else ""
        with (self.folder / "order").open("a") as order:
            order.write(f"{name} {self.role} {where}{cut_to}\n")

    def _keep(self, source: str, copied: str) -> None:
        """Each content once on disk: of a training, hundreds of states hold the same weights."""
        content = Path(source).read_bytes()
        kept = self.folder / "contents" / hashlib.blake2b(content, digest_size=16).hexdigest()
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            written = kept.with_name(f"{kept.name}.{os.getpid()}")
            written.write_bytes(content)
            written.rename(kept)
        os.link(kept, copied)


def run(words: list[str], root: Path, copies: Path | None, said: Path, children: Sequence[int]) -> int:
    """Run a command, to be called in a fork, with its output in the file ``said``. ``copies``: the folder of the copies;
    ``children``: of Spares."""

    def begin(role: str) -> None:
        if copies is not None:
            watch(root, Copies(root, copies, role))

    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    Spares(children, begin).install()
    begin("command")
    return run_module(["gymdata.cli", *words])


@dataclass
class Killed:
    """A command that was killed in every state that its files below ``work`` pass through."""

    forks: Forks
    folder: Path
    words: list[str]
    held: Callable[[Path], Any]
    children: Sequence[int] = ()
    #: More words for a command that starts over what is finished.
    over: Sequence[str] = ()
    #: ``run``, or what calls it.
    how: Callable[..., int] = run

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def finish(self, copies: Path | None = None) -> tuple[int, str]:
        """The same command's exit code and what it printed."""
        said = self.folder / "said"
        code = self.forks.start(self.how, self.words, self.work, copies, said, list(self.children)).wait()
        return code, said.read_text()

    def states(self) -> Iterator[tuple[str, Path]]:
        """(what it was about to do, a copy of its files)."""
        copies = self.folder / "copies"
        for line in (copies / "order").read_text().splitlines():
            name, _, what = line.partition(" ")
            yield what, copies / name / "files"

    def put(self, files: Path) -> None:
        shutil.rmtree(self.work)
        shutil.copytree(files, self.work, symlinks=True)

    def faults(
        self,
        wanted: Callable[[str], bool] = lambda _: True,
        *,
        moment: Callable[[str, Path], Hashable] = lambda _, files: files,
        again: Callable[[Path], bool] = lambda _: False,
    ) -> tuple[list[str], int]:
        """What went wrong, and in how many states the command was tried. ``wanted``: which states, by what comes next;
        ``moment``: of states for which it is equal, by what comes next and their files, the first is tried; ``again``: the
        first state, by its files, whose continuation is killed everywhere, too."""
        expected = self._recorded()
        middle = next((files for _, files in self.states() if again(files)), None)
        if middle is not None:
            self.put(middle)
            assert self.finish(self.folder / "copies")[0] == 0
        wrong, tried, moments = list[str](), 0, set[Hashable]()
        try:
            for what, files in list(self.states()):
                if not wanted(what) or (reached := moment(what, files)) in moments:
                    continue
                moments.add(reached)
                self.put(files)
                code, said = self.finish()
                if code:
                    wrong.append(f"before {what}: refused with {code}: {said[-500:]}")
                elif differing := differences(self.held(self.work), expected):
                    wrong.append(f"before {what}: not as without the kill: {differing}")
                tried += 1
        finally:
            # Of a matrix that is stopped too, how far it came.
            tell(self.words[0], tried, sum(": refused with " in fault for fault in wrong), len(wrong))
        return wrong, tried

    def _recorded(self) -> dict[str, Any]:
        """What the command leaves when nobody kills it, which is the same each time; its states are copied."""
        copies = self.folder / "copies"
        self.work.mkdir()
        code, said = self.finish()
        assert code == 0, said
        expected = self.held(self.work)
        assert expected
        shutil.rmtree(self.work)
        self.work.mkdir()
        tries: list[tuple[Sequence[str], Path | None]] = [([], copies), ([], None)]
        if self.over:
            tries.append((self.over, copies))
        for more, kept in tries:
            if more:
                shutil.rmtree(copies)
                self.words = [*self.words, *more]
            code, said = self.finish(kept)
            differing = differences(self.held(self.work), expected)
            assert (code, differing) == (0, ""), f"{differing}\n{said}"
        return expected


def tell(command: str, states: int, refused: int, wrong: int) -> None:
    """One line for ``pytest -rP``: how many states, and what came of them."""
    sys.stdout.write(f"\nKILLED {command}: {states} states, {refused} refused, {wrong - refused} doubled or lost\n")


def line_of(what: str) -> str:
    """Of what a state is before: the process and its line of code, whatever file that writes, and how much of it."""
    return what.partition(",")[0]


def differences(got: dict[str, Any], expected: dict[str, Any]) -> str:
    """Names of what differs, with the beginnings of both."""
    names = [name for name in got.keys() | expected.keys() if got.get(name, ...) != expected.get(name, ...)]
    both = ((name, *(str(side.get(name, "missing"))[:300] for side in (got, expected))) for name in sorted(names))
    return "; ".join(f"{name}: {one} != {other}" for name, one, other in both)


@contextlib.contextmanager
def full_disk(at: int = 0) -> Iterator[None]:
    """No file of this process grows beyond ``at`` bytes: the system refuses it as a full disk does (EFBIG)."""
    limits, writes_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), not sys.dont_write_bytecode
    # Python would leave half the bytecode of a module that is imported now, which no later process could load.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = not writes_bytecode


#: How long a start, an engine and some rows may take on a busy machine, in seconds.
DEADLINE_S = 300.0


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """``gymdata collect …`` in a session of its own, so that everything it starts can be found."""
    return subprocess.Popen(
        [sys.executable, "-m", "gymdata.cli", "collect", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def fork(arguments: Sequence[str], command: str = "collect") -> multiprocessing.process.BaseProcess:
    """``start`` without the start-up time; output goes nowhere."""
    context = multiprocessing.get_context("forkserver")
    commands = ("collect", "record")
    modules = [*(f"gymdata.cli.{name}" for name in commands), *(f"gymdata.commands.{name}.run" for name in commands)]
    context.set_forkserver_preload([*modules, "transformers.models.auto.tokenization_auto", "aiohttp"])
    process = context.Process(target=_command, args=([command, *arguments],))
    process.start()
    return process


def kill_at(pid: int, run: Path, rows: int) -> None:
    """SIGKILL the process (not its children) once the run has ``rows`` rows; returns when it has ended.

    Nothing is killed when it ends by itself before.
    """
    end = time.monotonic() + DEADLINE_S
    ended = os.pidfd_open(pid)
    try:
        while rows_there(run) < rows:
            # Wakes at once when the process ends; else looks at the journal again.
            if select.select([ended], [], [], 0.002)[0]:
                return
            assert time.monotonic() < end, "the run makes no progress"
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        select.select([ended], [], [], DEADLINE_S)
    finally:
        os.close(ended)


def wait_for_rows(process: subprocess.Popen[bytes], run: Path, rows: int, named: str) -> list[int]:
    """Once the run has ``rows`` rows: the processes of its session whose name contains ``named``."""
    end = time.monotonic() + DEADLINE_S
    ended = os.pidfd_open(process.pid)
    try:
        while rows_there(run) < rows:
            assert not select.select([ended], [], [], 0.002)[0], "it ended too early"
            assert time.monotonic() < end, "the run makes no progress"
    finally:
        os.close(ended)
    found = []
    for member in session_members(process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if named in Path(f"/proc/{member}/cmdline").read_text():
                found.append(member)
    return found


def _command(words: list[str]) -> None:
    from gymdata.cli.main import main

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.argv = ["gymdata", *words]
    raise SystemExit(main(words))


def rows_there(run: Path) -> int:
    """Lines of open segments plus rows of sealed parts, without opening the run."""
    import pyarrow.parquet as pq

    total, sealed = 0, set()
    for part in (run / "rollouts").glob("part-*.parquet"):
        with contextlib.suppress(OSError):
            total += pq.read_metadata(part).num_rows
            sealed.add(part.stem)
    for lines in (run / "rollouts").glob("part-*.jsonl"):
        if lines.stem not in sealed:
            with contextlib.suppress(FileNotFoundError):
                total += lines.read_bytes().count(b"\n")
    return total


def session_members(session: int) -> list[int]:
    """Processes of a session that are alive (zombies are not)."""
    alive = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                alive.append(int(entry.name))
    return alive
