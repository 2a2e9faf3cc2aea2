"""Users beside an environment: ``--user path.py:NAME``. Tools stay the environment's; the user answers when none is called.

``NAME`` is a function ``NAME(messages, task)``, or a class with ``respond(self, message)``, one instance per rollout,
and ``reset(**task)`` and ``close()`` where it has them. Both may be async, and return what ``step.user_answer`` takes.

Invariants: a user that raises or hangs is the environment's fault, and the attempt fails; what a user may read is a
copy, so that nothing already sampled can change under its hands.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gymdata.environments.port import Environment, Episode, StepResult, Talk, User, Verdict
from gymdata.environments.python_tools import PythonTools
from gymdata.environments.step import gives_steps, guarded, user_answer
from gymdata.errors import UsageError
from gymdata.rollouts.messages import Message, Task, ToolDefinition
from gymdata.store.paths import Identity
from gymdata.user_code import in_memory, load_symbol

_FLAG = "--user"


def load_user(spec: str, *, timeout_s: float) -> User:
    """From ``path.py:NAME``. Raises UsageError."""
    target, source = load_symbol(spec, _FLAG)
    return _user(target, source, timeout_s)


def given_user(target: Any, *, timeout_s: float) -> User:
    """From a function or class that was given as an object. Raises UsageError."""
    if not callable(target):
        raise UsageError.bad_value("user", target, "path.py:NAME, a function or a class")
    return _user(target, in_memory(target)[1], timeout_s)


def _user(target: Any, source: str, timeout_s: float) -> User:
    where, _, digest = source.partition("@")
    identity = {"name": "python", "spec": where, "file_hash": digest}
    if inspect.isclass(target):
        return ClassUser(PythonTools(target, identity, timeout_s=timeout_s, tools=False))
    if not callable(target):
        raise UsageError.bad_value(f"{_FLAG} {where}", type(target).__name__, "a function or a class with respond")
    try:
        inspect.signature(target).bind([], {})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{_FLAG} {where}: {error}",
            hint="it is called with the messages so far and the task's row: f(messages, task)",
        ) from error
    return FunctionUser(target, identity, timeout_s)


class FunctionUser:
    """A function of the messages so far and the task's row."""

    def __init__(self, function: Callable[..., Any], identity: Identity, timeout_s: float) -> None:
        self.identity, self.function, self.timeout_s = identity, function, timeout_s
        self.rewards_steps = gives_steps(function)

    async def start(self, task: Task, rollout_index: int, messages: Sequence[Message]) -> Talk:  # noqa: ARG002 - the port's
        return _FunctionTalk(self, task, messages)

    async def close(self) -> None: ...


class _FunctionTalk:
    def __init__(self, user: FunctionUser, task: Task, messages: Sequence[Message]) -> None:
        self._user, self._task, self._messages = user, task, messages

    async def reply(self, message: Message) -> StepResult:  # noqa: ARG002 - it is the last of the messages
        user = self._user
        name = str(getattr(user.function, "__name__", type(user.function).__name__))
        row = copy.deepcopy(self._task.row)  # all rollouts of the task share it
        answer = await guarded(name, user.function, list(self._messages), row, timeout_s=user.timeout_s)
        return user_answer(answer, name)

    async def close(self) -> None: ...


class ClassUser:
    """A class with ``respond``; its other methods are its own."""

    def __init__(self, tools: PythonTools) -> None:
        self.identity, self._tools = tools.identity, tools
        self.rewards_steps = tools.rewards_steps

    async def start(self, task: Task, rollout_index: int, messages: Sequence[Message]) -> Talk:
        return await self._tools.start(replace(task, messages=list(messages)), rollout_index)

    async def close(self) -> None: ...


class WithUser:
    """An environment, and a user who answers where its episodes would be over because no tool was called."""

    def __init__(self, environment: Environment, user: User) -> None:
        self.environment, self.user = environment, user
        self.identity: Identity = {**environment.identity, "user": dict(user.identity)}

    async def start(self, task: Task, rollout_index: int) -> Episode:
        """Both are set up. Raises OutsideError when either cannot be."""
        inner: Any = await self.environment.start(task, rollout_index)
        if not hasattr(inner, "user"):
            raise UsageError(
                "an environment that was given as an object has no place for a user",
                hint="give it a respond of its own, or leave the user out",
            )
        messages = list(inner.messages)
        try:
            inner.user = await self.user.start(task, rollout_index, messages)
        except BaseException:
            await inner.close()
            raise
        return _Conversation(inner, messages, getattr(inner, "rewards_steps", False) or self.user.rewards_steps)

    async def close(self) -> None:
        """Close both, also when one fails to close."""
        try:
            await self.environment.close()
        finally:
            await self.user.close()


class _Conversation:
    """An episode that keeps the conversation up to date for its user."""

    def __init__(self, inner: Any, messages: list[Message], rewards_steps: bool) -> None:
        self._inner, self._conversation, self.rewards_steps = inner, messages, rewards_steps
        self.messages: list[Message] = inner.messages
        self.tools: list[ToolDefinition] | None = inner.tools

    async def step(self, message: Message) -> StepResult:
        self._conversation.append(message)
        result: StepResult = await self._inner.step(message)
        self._conversation += result.messages
        return result

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict | None:
        verdict: Verdict | None = await self._inner.verdict(messages, stop_reason)
        return verdict

    async def close(self) -> None:
        try:
            await self._inner.user.close()
        finally:
            await self._inner.close()
