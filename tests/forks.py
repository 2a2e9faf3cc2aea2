"""Processes that are forked with their imports done: what a command takes to start is paid once."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

#: What a training takes seconds to load.
TRAINING = [
    "gymdata.cli.main", "gymdata.train.run", "gymdata.train.launch", "gymdata.train.trainers.run", "polars",
    "gymdata.train.trainers.sft", "gymdata.train.trainers.dpo", "gymdata.train.trainers.kto",
    "gymdata.train.trainers.reward", "gymdata.train.trainers.rl", "gymdata.train.trainers.value", "matplotlib.pyplot",
    "torch",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto",
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
