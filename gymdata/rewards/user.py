"""Reward functions from a user's Python file, or given as objects.

A function takes, by the names of its parameters, any of:

| of a batch | of one rollout | what it is |
| --- | --- | --- |
| ``completions`` | ``completion`` | what came of the prompt |
| ``prompts`` | ``prompt`` | what it was given |
| ``completion_ids`` | ``completion_ids`` | every token id after the first prompt |
| ``messages`` | ``messages`` | the whole conversation, as chat messages |
| ``stdout`` | ``stdout`` | what the environment says under that name or the agent wrote, else the task's column |
| ``stderr``, ``exit_code`` | the same | of an agent's run, else the task's columns |
| ``directory`` | ``directory`` | the agent's folder, a ``Path``, while rollouts are collected, else the task's column |
| any column | any column | of the tasks' rows |

Each is a list with one entry per rollout where the function is called for a batch, as TRL's trainers do. It is called for
one rollout at a time when it takes ``completion`` or ``prompt``; or takes none of these four names and its annotation
says that it returns one number (``-> float``), or it takes ``stderr``, ``exit_code`` or ``directory``. Prompt and
completion are text when the task has a text ``prompt`` and there are no tools (so that the answer is one message);
otherwise both are lists of chat messages. That depends on the task and the environment alone, never on what else is in
the batch.

A value is a finite number, or None (or NaN, as TRL has it) where the function does not apply, or a list with
one number per turn: those are the turns' rewards, and their sum is the value. The function may be ``async``; of one
rollout at a time, as many as ``CONCURRENT`` calls are awaited together. It must score each rollout on its own, because
which rollouts form a batch depends on what finished when.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np

from gymdata.errors import OutsideError, RewardError, UsageError, brief, counted, option, raised
from gymdata.rewards.port import TRIES, TaskRow, Value, View
from gymdata.rollouts.turns import expand_prompts, main_turns
from gymdata.user_code import place_of, raised_at

#: Calls of an async function of one rollout that are awaited together.
CONCURRENT = 32


def conversation_ids(rollout: View) -> tuple[np.ndarray, np.ndarray]:
    """Of the conversation that the rollout's messages are (``main_turns``), as int32: the first prompt, and the last prompt
    with its generation; empty where the rollout has no turns.

    Raises DataError (T209, T210) when the turns are not what was collected.
    """
    turns = rollout["turns"]
    if not turns:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    prompts = expand_prompts(turns)
    first, last = main_turns(turns, prompts)
    generation = np.asarray(turns[last]["generation_token_ids"], dtype=np.int32)
    return prompts[first], np.concatenate((prompts[last], generation))


#: What an environment or agent leaves of a rollout. Functions that name it get it; for others it is a task's column.
_LEFT = ("stdout", "stderr", "exit_code", "directory")
#: What of a rollout reaches user code.
_HANDED_OUT = ("messages", "prompt", "completion", "completion_ids", "task", *_LEFT)
_BATCH, _ONE = ("completions", "prompts"), ("completion", "prompt")
#: Never columns; ``messages`` and ``stdout`` are only for functions that name them.
_RESERVED = frozenset({*_BATCH, *_ONE, "completion_ids", "messages", "stdout"})
_NUMBERS = frozenset({"float", "int", "bool", "None", "NoneType"})

_LOG = logging.getLogger(__name__)


class UserReward:
    """A ports.RewardFunction around a user's function.

    ``useless`` is the fault that it has with every rollout, once that is known. ``single``: called for one rollout at a
    time, so that a fault is of that rollout alone.
    """

    quick = False
    bounded = False
    needs: str | None = None
    concurrent = CONCURRENT
    #: Parameters that it takes, and those without a default.
    _takes: frozenset[str] = frozenset()
    _required: Sequence[str] = ()

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.source = source
        self.function = function
        self.useless: OutsideError | None = None
        #: Whether it returned as many values as there were rollouts, for more than one.
        self._counts = False
        self._defined = place_of(function)
        #: Places and types of its errors; the traceback of each is logged once.
        self._logged_errors: set[tuple[str, str]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_signature()

    def _read_signature(self) -> None:
        signature = inspect.signature(self.function)
        parameters = signature.parameters.values()
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._takes = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty]
        singular, plural = (sorted(self._takes.intersection(names)) for names in (_ONE, _BATCH))
        if singular and plural:
            raise UsageError(
                f"reward {self.name}: takes {', '.join(singular)}, which is of one rollout, and {', '.join(plural)}, which "
                f"is of a batch ({self._defined})",
                hint="take completion and prompt and return a number, or completions and prompts and return a list",
            )
        # What one agent left: a function of a batch says so by completions or prompts.
        of_agent = self._takes & {"stderr", "exit_code", "directory"}
        self.single = bool(singular) or (not plural and (bool(of_agent) or _is_number(signature.return_annotation)))

    def __call__(self, rollouts: Sequence[View]) -> list[Value]:
        """One value each. Raises RewardError when a function of a batch raises or returns something else; of one rollout
        at a time, the fault is in the place of its rollout."""
        if self.useless is not None:
            raise self.useless
        if self.single:
            return cast("list[Value]", self._run(self._score_singly(rollouts)))
        values = self._batch(rollouts)
        if not self._counts and len(rollouts) == 1:
            self._batch([*rollouts, *rollouts])
        self._counts = True
        return values

    async def _score_singly(self, rollouts: Sequence[View]) -> list[Value]:
        room = asyncio.Semaphore(self.concurrent)

        async def with_retries(rollout: View) -> Value:
            async with room:
                for _ in range(TRIES):
                    value = await self._call_once(rollout)
                    if not isinstance(value, OutsideError):
                        break
            return value

        return await asyncio.gather(*map(with_retries, rollouts))

    async def _call_once(self, rollout: View) -> Value:
        try:
            value = self.call(rollout)
            return self.value_of(await value if inspect.isawaitable(value) else value, rollout)
        except RewardError as error:
            return error
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, also what ends programs
            return self._raised(error, [rollout])

    def call(self, rollout: View) -> Any:
        """The function's value of one rollout, or an awaitable of it."""
        arguments = {name: value for name, (value,) in self._arguments([self.private_copy(rollout)]).items()}
        for plural, singular in zip(_BATCH, _ONE, strict=True):
            if plural in arguments:
                arguments[singular] = arguments.pop(plural)
        return self.function(**self._keywords(arguments))

    def private_copy(self, rollout: View) -> View:
        """A copy for one call: what the function changes in it reaches no saved row, sibling or other reward."""
        handed_out = {key: value for key, value in rollout.items() if key in _HANDED_OUT}
        return cast("View", {**rollout, **copy.deepcopy(handed_out)})

    def _batch(self, rollouts: Sequence[View]) -> list[Value]:
        try:
            values = self.function(**self._keywords(self._arguments([*map(self.private_copy, rollouts)])))
            if inspect.isawaitable(values):
                values = self._run(values)
            # The values that a function returned, in order; None for what has none: a number, a text, a mapping.
            listed = (
                None
                if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(type(values), "__iter__")
                else list(values)
            )
        except RewardError:
            raise
        except BaseException as error:  # user code may raise anything, also what ends programs or cancels tasks
            raise self._raised(error, rollouts) from error
        if listed is None:
            kind = type(values).__name__
            article = "an" if kind[:1].lower() in "aeiou" else "a"
            raise self._useless(f"{article} {kind}, expected a list of numbers")
        if len(listed) != len(rollouts):
            # Which value belongs to which rollout cannot be known, so none is used.
            n = counted(len(rollouts), "rollout")
            raise self._useless(f"{counted(len(listed), 'value')} for {n}, expected one for each")
        return [self.value_of(value, rollout) for value, rollout in zip(listed, rollouts, strict=True)]

    def _run(self, awaitable: Any) -> Any:
        """Await in the loop that every call of this function shares: a client that it keeps is bound to that loop."""
        if self._loop is None or self._loop.is_running():  # a running loop belongs to a thread that was left behind

            def close(loop: asyncio.AbstractEventLoop) -> None:
                if not loop.is_running():
                    loop.close()

            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, close, self._loop)

        async def awaited() -> Any:
            return await awaitable

        return self._loop.run_until_complete(awaited())

    def _useless(self, returned: str) -> RewardError:
        """The fault of what was ``returned`` for all rollouts alike."""
        hint = "return a list with one number, or None, per completion, in their order"
        self.useless = RewardError(f"{self.name} returned {returned} ({self._defined})", hint=hint, fatal=True)
        return self.useless

    def _raised(self, error: BaseException, rollouts: Sequence[View]) -> RewardError:
        """The fault of what the function raised. A Ctrl-C of the command's is raised again."""
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise error
        where = raised_at(error, self.function, self._defined)
        if (type(error).__name__, where) not in self._logged_errors:
            self._logged_errors.add((type(error).__name__, where))
            _LOG.debug("%s raised", self.name, exc_info=error)
        texts = [name for name, plural in zip(_ONE, _BATCH, strict=True) if self._takes & {name, plural}]
        note = ""
        if texts and not all(map(_plain, rollouts)) and isinstance(error, (AttributeError, KeyError, TypeError)):
            # It may have taken the messages for a text.
            note = f"; a {texts[0]} is a list of messages here, its last text: {texts[0]}[-1]['content']"
        fault = RewardError(f"{self.name} raised {raised(error)} ({where}){note}")
        fault.__cause__ = error
        return fault

    def value_of(self, value: Any, rollout: View) -> Value:
        """The value of ``rollout`` from what the function returned. Raises RewardError for an invalid one."""
        if value is None:
            return None
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
        except BaseException:  # noqa: BLE001 - user code
            number = math.inf
        if math.isinf(number):
            got = f"{self.name} returned {brief(value)} for a rollout"
            raise RewardError(f"{got}, expected a finite number or None ({self._defined})")
        return None if math.isnan(number) else number

    def lacking(self, task: TaskRow) -> list[str]:
        """Required parameters that are not columns of this task."""
        return [name for name in self._required if name not in _RESERVED and name not in _LEFT and name not in task]

    def _keywords(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The ``arguments`` that the function takes. Raises RewardError when a required one is missing."""
        lacking = [name for name in self._required if name not in arguments]
        if lacking:
            columns = sorted(name for name in arguments if name not in _RESERVED)
            raise RewardError(
                f"{self.name} takes {', '.join(map(repr, lacking))}, which the task has no column for; it has "
                f"{', '.join(columns) or 'none'} ({self._defined})"
            )
        named = {k: v for k, v in arguments.items() if k in self._takes}
        return {k: v for k, v in arguments.items() if k not in ("messages", "stdout")} | named if self._open else named

    def _arguments(self, rollouts: Sequence[View]) -> dict[str, list[Any]]:
        if "directory" in self._required and not any(_left(r, "directory") for r in rollouts):
            raise RewardError(
                f"{self.name} takes 'directory', the folder of an agent, which is there only while rollouts are collected "
                f"with {option('agent')} ({self._defined})"
            )
        rows = [r["task"] for r in rollouts]
        columns = {key: [row.get(key) for row in rows] for key in {k: None for row in rows for k in row}}
        return {
            **{key: values for key, values in columns.items() if key not in _RESERVED and key.isidentifier()},
            "prompts": [r["task"]["prompt"] if _plain(r) else r["prompt"] for r in rollouts],
            "completions": [r["text"] if _plain(r) else r["completion"] for r in rollouts],
            "completion_ids": [r["completion_ids"] for r in rollouts],
            "messages": [r["messages"] for r in rollouts],
            **{name: [_left(r, name) for r in rollouts] for name in _LEFT if name in self._takes},
        }


def _left(rollout: View, name: str) -> object:
    value = rollout.get(name)
    return rollout["task"].get(name) if value is None else value


def n_turns(rollout: View) -> int:
    """Model calls of a rollout; of one without token ids, its assistant messages after the prompt."""
    turns = rollout.get("turns")
    return len(turns) if turns else sum(m["role"] == "assistant" for m in rollout["completion"])


def _is_number(annotation: Any) -> bool:
    """Whether a return annotation is a number, or a number or None."""
    if annotation in (inspect.Signature.empty, None):
        return False
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    names = {part.strip().rpartition(".")[2] for part in text.replace("Optional[", "None|").rstrip("]").split("|")}
    return names <= _NUMBERS and names != {"None"}


def _plain(rollout: View) -> bool:
    # Without tools there is one answer, or none when the time ran out; only foreign conversations have more.
    return isinstance(rollout["task"].get("prompt"), str) and not rollout["tools"] and len(rollout["completion"]) <= 1
