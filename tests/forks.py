"""Processes that are forked with their imports done: what a command takes to start is paid once."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: What a training takes seconds to load.
TRAINING = [
    "gymdata.cli.main", "gymdata.commands.train.run", "gymdata.commands.train.process",
    "gymdata.commands.train.trainers.run", "polars", "gymdata.commands.train.trainers.sft",
    "gymdata.commands.train.trainers.dpo", "gymdata.commands.train.trainers.kto",
    "gymdata.commands.train.trainers.reward", "gymdata.commands.train.trainers.rl",
    "gymdata.commands.train.trainers.value", "torch", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
]  # fmt: skip


@dataclass
class Fork:
    """A process that was started; what ``subprocess.Popen`` has of this is called the same."""

    pid: int
    _orders: Connection
    _code: int | None = None

    def wait(self) -> int:
        """The exit code; of one that a signal ended, minus its number."""
        if self._code is None:
            self._orders.send(("wait", self.pid))
            self._code = self._orders.recv()
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Forks:
    """Where processes come from. It runs nothing itself, so that it has no threads."""

    _orders: Connection

    def start(self, function: Callable[..., int], *arguments: Any) -> Fork:
        """Call a module's function in a process of its own, whose exit code is what it returns."""
        self._orders.send(("start", function, arguments))
        return Fork(self._orders.recv(), self._orders)

    def load(self, modules: Iterable[str]) -> None:
        """Import modules, so that those who start later need not."""
        self._orders.send(("import", list(modules)))
        self._orders.recv()


@contextlib.contextmanager
def forks(*modules: str) -> Iterator[Forks]:
    """``Forks`` with ``modules`` imported."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_obey, args=(theirs,))
    process.start()
    made = Forks(ours)
    made.load(modules)
    yield made
    ours.send(None)
    process.join()


def _obey(orders: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    while (order := orders.recv()) is not None:
        what, *given = order
        if what == "start":
            orders.send(os.fork() or _call(*given))
        elif what == "wait":
            orders.send(os.waitstatus_to_exitcode(os.waitpid(given[0], 0)[1]))
        else:
            for name in given[0]:
                # Of what another process had loaded, some is part of what is loaded already.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            orders.send(None)


def _call(function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    code = 70
    try:
        code = function(*arguments)
    except BaseException:  # noqa: BLE001 - it ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(code)


class Started:
    """A command of Python's that was started as a fork; of ``subprocess.Popen`` what callers use."""

    def __init__(self, args: Sequence[str], pid: int, stdout: Any) -> None:
        self.args, self.pid, self.stdout, self.returncode = args, pid, stdout, None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._reap(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._reap(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return code

    def communicate(self, *_: Any, **__: Any) -> tuple[None, None]:
        self.wait()
        return None, None

    def _reap(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


class Spares:
    """Forks of this process from before it did anything, so that nothing of its threads is in them. Each becomes one child
    that the command would start as ``python -m …``, and takes spares along for children of its own."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """``numbers``: how many children, how many each of them has, and so on."""
        self._waiting = list[tuple[int, socket.socket]]()
        for _ in range(numbers[0] if numbers else 0):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, other in self._waiting:
                    other.close()
                self._obey(theirs, numbers[1:])
            theirs.close()
            self._waiting.append((pid, ours))

    def install(self) -> None:
        real = subprocess.Popen

        def popen(words: Any, *args: Any, **kwargs: Any) -> Any:
            given = list(map(str, words)) if isinstance(words, (list, tuple)) else []
            if sys.executable not in given or "-m" not in given:
                return real(words, *args, **kwargs)
            return self._start(given[given.index("-m") + 1 :], **kwargs)

        subprocess.Popen = popen  # type: ignore[assignment,misc]  # a function in place of the class

    def _start(self, words: list[str], stdout: Any = None, stderr: Any = None, env: Any = None, **_: Any) -> Started:
        pid, orders = self._waiting.pop(0)
        read = None
        if stdout == subprocess.PIPE:
            read, stdout = os.pipe()
        files = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        message = pickle.dumps((words, dict(env or os.environ), str(Path.cwd())))
        socket.send_fds(orders, [message], numbers)
        orders.recv(1)
        orders.close()
        if read is not None:
            os.close(stdout)
        return Started(words, pid, os.fdopen(read, "rb") if read is not None else None)

    def _obey(self, orders: socket.socket, numbers: Sequence[int]) -> None:
        code = 70
        try:
            message, files, _, _ = socket.recv_fds(orders, 1 << 20, 2)
            if not message:
                os._exit(0)
            words, environment, folder = pickle.loads(message)
            os.setpgid(0, 0)
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            Spares(numbers).install()
            orders.send(b"1")
            code = run_module(words)
        except BaseException:  # noqa: BLE001 - it ends here, whatever it was
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def run(words: list[str], said: Path, children: Sequence[int] = ()) -> int:
    """A command of gymdata, to be called in a fork, with its output in the file ``said``. ``children``: of Spares."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    Spares(children).install()
    return run_module(["gymdata.cli", *words])


def run_module(words: list[str]) -> int:
    """``python -m WORDS``, in this process."""
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    return 0
