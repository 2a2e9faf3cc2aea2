"""Children of a forked process that are forks, too: what ``python -m …`` takes to start is paid once."""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


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

    def __init__(self, numbers: Sequence[int], begin: Callable[[str], None]) -> None:
        """``numbers``: how many children, how many each of them has, and so on. ``begin``: called in each child that
        becomes something, with a name for it."""
        self._begin, self._waiting = begin, list[tuple[int, socket.socket]]()
        self._begun = 0
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
        message = pickle.dumps(
            (words, dict(env or os.environ), f"{self._begun} {words[0]} {words[1]}", str(Path.cwd()))
        )
        self._begun += 1
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
            words, environment, role, folder = pickle.loads(message)
            os.setpgid(0, 0)
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            Spares(numbers, self._begin).install()
            self._begin(role)
            orders.send(b"1")
            code = run_module(words)
        except BaseException:  # noqa: BLE001 - it ends here, whatever it was
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


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
