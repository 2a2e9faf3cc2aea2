"""Reward functions from a user's Python file, or given as objects.

A function names as parameters what it reads of a rollout:

| parameter | what it is |
| --- | --- |
| ``completion`` | what came of the prompt |
| ``prompt`` | what it was given |
| ``completion_ids`` | every token id after the first prompt |
| ``messages`` | the whole conversation, as chat messages |
| ``stdout`` | what the environment says under that name or the agent wrote, else the task's column |
| ``stderr``, ``exit_code`` | of an agent's run, else the task's columns |
| ``directory`` | the agent's folder, a ``Path``, while rollouts are collected, else the task's column |
| any column | of the task's row |

It is called for one rollout. A function that takes ``completions`` or ``prompts``, or ``completion_ids`` and neither
``completion`` nor ``prompt``, is called for a batch, as TRL's trainers do: then each of these is a list with one entry
per rollout, and so is what it returns. Prompt and completion are text when the task has a text ``prompt`` and there are
no tools (so that the answer is one message); otherwise both are lists of chat messages. That depends on the task and
the environment alone, never on what else is in the batch.

A value is a finite number, or None (or NaN, as TRL has it) where the function does not apply, or a list with one number per
turn: those are the turns' rewards, and their sum is the value. The function may be ``async``; of one rollout at a time, as
many as ``CONCURRENT`` calls are awaited together. It must score each rollout on its own, because which rollouts form a batch
depends on what finished when.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from gymdata.errors import RewardError, UsageError, brief, counted, option, raised
from gymdata.rewards.port import TaskRow, Value, View
from gymdata.rewards.views import n_turns
from gymdata.user_code import place_of, raised_at

#: Calls of an async function of one rollout that are awaited together.
CONCURRENT = 32
#: Tries of a function on one rollout.
TRIES = 3
#: What an environment or agent leaves of a rollout. Functions that name it get it; for others it is a task's column.
_LEFT = ("stdout", "stderr", "exit_code", "directory")
#: Of one rollout, and of a batch.
_PLURAL = {"completion": "completions", "prompt": "prompts"}
#: Never columns; ``messages`` and ``stdout`` are only for functions that name them.
_RESERVED = frozenset({*_PLURAL, *_PLURAL.values(), "completion_ids", "messages", "stdout"})

_LOG = logging.getLogger(__name__)


class UserReward:
    """A ``RewardFunction`` around a user's function."""

    quick = False
    bounded = False
    needs: str | None = None
    concurrent = CONCURRENT

    def __init__(self, function: Callable[..., Any], source: str, name: str | None = None) -> None:
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.source = source
        self.function = function
        self._defined = place_of(function)
        #: The fault that it has with every rollout, once that is known.
        self._fatal: RewardError | None = None
        #: Places and types of its errors; the traceback of each is logged once.
        self._logged_errors: set[tuple[str, str]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Parameters that it takes, and those without a default; whether it takes any column, and a batch.
        self._takes: Set[str] = frozenset()
        self._required: Sequence[str] = ()
        self._open = self._of_batch = False
        self._read_signature()

    def _read_signature(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty]
        singular, plural = (sorted(self._takes & set(names)) for names in (_PLURAL, _PLURAL.values()))
        if singular and plural:
            raise UsageError(
                f"reward {self.name}: takes {', '.join(singular)}, which is of one rollout, and {', '.join(plural)}, which "
                f"is of a batch ({self._defined})",
                hint="take completion and prompt and return a number, or completions and prompts and return a list",
            )
        # TRL's own first example takes the ids alone.
        self._of_batch = bool(plural) or ("completion_ids" in self._takes and not singular)

    def __call__(self, rollouts: Sequence[View]) -> list[Value]:
        """Await in the loop that every call of this function shares: a client that it keeps is bound to that loop."""
        if self._loop is None or self._loop.is_running():  # a running loop belongs to a thread that was left behind

            def close(loop: asyncio.AbstractEventLoop) -> None:
                if not loop.is_running():
                    loop.close()

            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, close, self._loop)
        return self._loop.run_until_complete(self._score(rollouts))

    async def _score(self, rollouts: Sequence[View]) -> list[Value]:
        if self._of_batch and len(rollouts) > 1:
            values = await self._values(rollouts)
            if not isinstance(values[0], RewardError):
                return values
        # By itself, a rollout that the function raises on takes no other with it.
        room = asyncio.Semaphore(self.concurrent)

        async def with_retries(rollout: View) -> Value:
            async with room:
                for _ in range(TRIES):
                    (value,) = await self._values([rollout])
                    if not isinstance(value, RewardError):
                        break
                return value

        return await asyncio.gather(*map(with_retries, rollouts))

    async def _values(self, rollouts: Sequence[View]) -> list[Value]:
        """One value each, of a batch or of the only one; where the function failed, its fault in every place."""
        if self._fatal is not None:
            return [self._fatal] * len(rollouts)
        fault: RewardError
        try:
            returned = self.call(rollouts)
            if inspect.isawaitable(returned):
                returned = await returned
            values = self._listed(returned, len(rollouts)) if self._of_batch else [returned]
            return [self.value_of(value, rollout) for value, rollout in zip(values, rollouts, strict=True)]
        except RewardError as error:
            fault = error
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, also what ends programs or cancels tasks
            fault = self._raised(error, rollouts)
        return [fault] * len(rollouts)

    def call(self, rollouts: Sequence[View]) -> Any:
        """What the function returns, or an awaitable of it."""
        each = [self._arguments(rollout) for rollout in rollouts]
        names = {name: None for one in each for name in one}
        if lacking := [name for name in self._required if name not in names]:
            columns = sorted(name for name in rollouts[0]["task"] if name.isidentifier() and name not in _RESERVED)
            raise RewardError(
                f"{self.name} takes {', '.join(map(repr, lacking))}, which the task has no column for; it has "
                f"{', '.join(columns) or 'none'} ({self._defined})"
            )
        if not self._of_batch:
            return self.function(**each[0])
        return self.function(**{name: [one.get(name) for one in each] for name in names})

    def _arguments(self, rollout: View) -> dict[str, Any]:
        """What it takes of one rollout: copies, so that what it changes reaches no saved row, sibling or other reward."""
        task, plain = rollout["task"], _plain(rollout)
        given = {name: value for name, value in task.items() if name.isidentifier() and name not in _RESERVED}
        texts = (rollout["text"], task.get("prompt")) if plain else (rollout["completion"], rollout["prompt"])
        given |= zip(_PLURAL.values() if self._of_batch else _PLURAL, texts, strict=True)
        given["completion_ids"] = rollout["completion_ids"]
        by_name = {"messages": rollout["messages"], **{name: _left(rollout, name) for name in _LEFT}}
        given |= {name: value for name, value in by_name.items() if name in self._takes}
        if "directory" in self._required and given["directory"] is None:
            raise RewardError(
                f"{self.name} takes 'directory', the folder of an agent, which is there only while rollouts are collected "
                f"with {option('agent')} ({self._defined})"
            )
        return copy.deepcopy({name: value for name, value in given.items() if self._open or name in self._takes})

    def lacking(self, task: TaskRow) -> list[str]:
        """Required parameters that are not columns of this task."""
        return [name for name in self._required if name not in _RESERVED and name not in _LEFT and name not in task]

    def _listed(self, returned: Any, n: int) -> list[Any]:
        """The values of a batch of ``n`` rollouts. Raises RewardError for anything else, and from then on: which value
        belongs to which rollout cannot be known, and called one by one, the function would be right by accident."""
        got = f"a value of type {type(returned).__name__}, expected a list of numbers"
        if hasattr(type(returned), "__iter__") and not isinstance(returned, (str, bytes, Mapping, Set)):
            values = list(returned)
            if len(values) == n:
                return values
            got = f"{counted(len(values), 'value')} for {counted(n, 'rollout')}, expected one for each"
        self._fatal = RewardError(
            f"{self.name} returned {got} ({self._defined})",
            hint="return a list with one number, or None, per completion, in their order",
            fatal=True,
        )
        raise self._fatal

    def value_of(self, value: Any, rollout: View) -> Value:
        """The value of ``rollout`` from what the function returned. Raises RewardError for an invalid one."""
        if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1):
            turns = n_turns(rollout)
            if len(value) != turns:
                shape = f"{counted(len(value), 'value')} for a rollout with {counted(turns, 'turn')}"
                raise RewardError(f"{self.name} returned {shape}, expected a number, or one per turn ({self._defined})")
            return tuple(map(self._number, value))
        return self._number(value)

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            if isinstance(value, (str, bytes, bytearray, np.complexfloating, np.timedelta64)):  # float() takes them
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if math.isinf(number):
            got = f"{self.name} returned {brief(value)} for a rollout"
            raise RewardError(f"{got}, expected a finite number or None ({self._defined})")
        return None if math.isnan(number) else number

    def _raised(self, error: BaseException, rollouts: Sequence[View]) -> RewardError:
        """The fault of what the function raised."""
        where = raised_at(error, self.function, self._defined)
        if (type(error).__name__, where) not in self._logged_errors:
            self._logged_errors.add((type(error).__name__, where))
            _LOG.debug("%s raised", self.name, exc_info=error)
        texts = [name for name, plural in _PLURAL.items() if self._takes & {name, plural}]
        note = ""
        if texts and not all(map(_plain, rollouts)) and isinstance(error, (AttributeError, KeyError, TypeError)):
            # It may have taken the messages for a text.
            note = f"; a {texts[0]} is a list of messages here, its last text: {texts[0]}[-1]['content']"
        fault = RewardError(f"{self.name} raised {raised(error)} ({where}){note}")
        fault.__cause__ = error
        return fault


def _left(rollout: View, name: str) -> object:
    value = rollout.get(name)
    return rollout["task"].get(name) if value is None else value


def _plain(rollout: View) -> bool:
    # Without tools there is one answer, or none when the time ran out; only foreign conversations have more.
    return isinstance(rollout["task"].get("prompt"), str) and not rollout["tools"] and len(rollout["completion"]) <= 1
