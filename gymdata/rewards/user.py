"""Reward functions from a user's Python file, with the signature that TRL's trainers call.

``f(prompts, completions, completion_ids, **columns) -> list[float | None]``: a column for each field of the tasks' rows.
A rollout's prompt and completion are strings when its task has a string ``prompt`` and there are no tools (so that the
answer is one message); otherwise both are lists of chat messages. That depends on the task and the environment alone,
never on what else is in the batch, so it is the same while collecting and while scoring again. None, or NaN as TRL has
it, means that the function does not apply. The function may be ``async``. How rollouts are batched depends on what
finished when, so it must score each on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import numpy as np

from gymdata.errors import OutsideError, RewardError, UsageError
from gymdata.rollouts.turns import expand_prompts
from gymdata.user_code import in_memory, load_symbol, place_in, place_of


def last_ids(rollout: Mapping[str, Any]) -> np.ndarray:
    """Prompt and generation of the last turn, as int32; empty where the rollout has no turns.

    Raises DataError (T209, T210) when the turns are not what was collected.
    """
    turns = rollout["turns"]
    if not turns:
        return np.empty(0, np.int32)
    generation = np.asarray(turns[-1]["generation_token_ids"], dtype=np.int32)
    return np.concatenate((expand_prompts(turns)[-1], generation))


def first_prompt_ids(rollout: Mapping[str, Any]) -> np.ndarray:
    """The prompt of the first turn."""
    return np.asarray(rollout["turns"][0]["prompt_delta_ids"], dtype=np.int32)


def without_ids() -> OutsideError:
    """A rollout that came without token ids cannot be scored as it was sampled."""
    return RewardError("T205: the rollout has no token ids")


_RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})


_LOG = logging.getLogger(__name__)


class UserReward:
    """A ports.RewardFunction around a user's function.

    ``useless`` is the fault that it has with every rollout, once that is known.
    """

    quick = False
    bounded = False
    needs: str | None = None

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.source = source
        self.function = function
        self.useless: OutsideError | None = None
        #: Whether it returned as many values as there were rollouts, for more than one.
        self._counts = False
        self._defined = place_of(function)
        #: Where it raised what; the traceback of each is logged once.
        self._seen: set[tuple[str, str]] = set()
        parameters = inspect.signature(function).parameters.values()
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters}

    @classmethod
    def load(cls, spec: str) -> UserReward:
        """From ``path.py:function``. Raises UsageError."""
        function, source = load_symbol(spec, "--reward")
        if inspect.isclass(function):
            # It can be called, which makes an instance and no rewards.
            name = spec.rpartition(":")[2]
            raise UsageError(
                f"--reward {spec}: got the class {name}, expected a function",
                hint=f"name an instance in the file (reward = {name}()) and give that",
            )
        if not callable(function):
            raise UsageError.bad_value("--reward", spec, f"a function, got {type(function).__name__}")
        try:
            return cls(function, source)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--reward {spec}: its parameters cannot be read: {error}") from error

    @classmethod
    def given(cls, function: Any) -> UserReward:
        """From a function that was given as an object. Raises UsageError."""
        if inspect.isclass(function) or not callable(function):
            raise UsageError.bad_value("reward", function, "a name, path.py:function, or a function")
        name, source = in_memory(function)
        if not name.isidentifier():
            raise UsageError(f"reward: got {name}, expected a function with a name", hint="write it with def")
        try:
            return cls(function, source)
        except (TypeError, ValueError) as error:
            raise UsageError(f"reward {name}: its parameters cannot be read: {error}") from error

    def __call__(self, rollouts: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """One value each. Raises RewardError when the function raises or returns something else."""
        if self.useless is not None:
            raise self.useless
        values = self._called(rollouts)
        if not self._counts and len(rollouts) == 1:
            self._called([*rollouts, *rollouts])
        self._counts = True
        return values

    def _called(self, rollouts: Sequence[Mapping[str, Any]]) -> list[float | None]:
        try:
            with _exit_raises():
                values = self.function(**self._arguments(rollouts))
                if inspect.isawaitable(values):
                    values = asyncio.run(_awaited(values))
                listed = _listed(values)
        except BaseException as error:  # user code may raise anything, also what ends programs or cancels tasks
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            where = place_in(error, getattr(inspect.getmodule(self.function), "__file__", None)) or self._defined
            self._log(error, where)
            raise RewardError.raised(self.name, error, where) from error
        if listed is None:
            raise self._useless(RewardError.wrong_type(self.name, values, self._defined))
        if len(listed) != len(rollouts):
            raise self._useless(RewardError.wrong_count(self.name, len(listed), len(rollouts), self._defined))
        return [self._value(value) for value in listed]

    def _useless(self, fault: RewardError) -> RewardError:
        self.useless = fault
        return fault

    def _log(self, error: BaseException, where: str) -> None:
        if (type(error).__name__, where) not in self._seen:
            self._seen.add((type(error).__name__, where))
            _LOG.debug("%s raised", self.name, exc_info=error)

    def _value(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError.no_number(self.name, value, self._defined) from error
        if math.isinf(number):
            raise RewardError.no_number(self.name, value, self._defined)
        return None if math.isnan(number) else number

    def _arguments(self, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [r["task"] for r in rollouts]
        columns = {key: [row.get(key) for row in rows] for key in {k: None for row in rows for k in row}}
        arguments = {
            **{key: values for key, values in columns.items() if key not in _RESERVED and key.isidentifier()},
            "prompts": [r["task"]["prompt"] if _plain(r) else r["prompt"] for r in rollouts],
            "completions": [r["text"] if _plain(r) else r["completion"] for r in rollouts],
            "completion_ids": [r["completion_ids"] for r in rollouts],
        }
        return arguments if self._open else {k: v for k, v in arguments.items() if k in self._takes}


_end_process, _calling = os._exit, threading.local()


@contextlib.contextmanager
def _exit_raises() -> Iterator[None]:
    """``os._exit`` in a user's function raises SystemExit, as ``sys.exit`` does. It would end the whole command, with the
    function's exit code for that of the command, and no word."""
    os._exit = _raise_or_exit
    _calling.process = os.getpid()
    try:
        yield
    finally:
        _calling.process = None


def _raise_or_exit(status: int) -> NoReturn:
    # Other threads, and processes that the function forks, end as they always do.
    if getattr(_calling, "process", None) == os.getpid():
        raise SystemExit(status)
    _end_process(status)


def _plain(rollout: Mapping[str, Any]) -> bool:
    # Without tools there is one answer, or none when the time ran out; only foreign conversations have more.
    return isinstance(rollout["task"].get("prompt"), str) and not rollout["tools"] and len(rollout["completion"]) <= 1


def _listed(values: Any) -> list[Any] | None:
    """The values that a function returned, in order; None for what has none: a number, a text, a mapping."""
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(type(values), "__iter__"):
        return None
    return list(values)


async def _awaited(value: Any) -> Any:
    return await value
