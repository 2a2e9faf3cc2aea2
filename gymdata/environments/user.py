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

from gymdata.environments.port import Environment, Episode, StepResult, Talk, Verdict
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
        return User(identity, PythonTools(target, identity, timeout_s=timeout_s, tools=False), timeout_s)
    if not callable(target):
        raise UsageError.bad_value(f"{_FLAG} {where}", type(target).__name__, "a function or a class with respond")
    try:
        inspect.signature(target).bind([], {})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{_FLAG} {where}: {error}",
            hint="it is called with the messages so far and the task's row: f(messages, task)",
        ) from error
    return User(identity, target, timeout_s)


class User:
    """Answers the policy when it calls no tool. ``identity`` goes to run.json; a change of it is another run.

    ``target``: a function of the messages so far and the task's row, or a class with ``respond``, whose other methods are
    its own. ``rewards_steps``: its answers have rewards, so that a rollout without one has the sum 0.
    """

    def __init__(self, identity: Identity, target: Callable[..., Any] | PythonTools, timeout_s: float) -> None:
        self.identity, self.target, self.timeout_s = identity, target, timeout_s
        self.rewards_steps = target.rewards_steps if isinstance(target, PythonTools) else gives_steps(target)

    async def start(self, task: Task, rollout_index: int, messages: Sequence[Message]) -> Talk:
        """``messages``: the conversation so far, which grows; read-only."""
        if isinstance(self.target, PythonTools):
            return await self.target.start(replace(task, messages=list(messages)), rollout_index)
        return _FunctionTalk(self.target, task, messages, self.timeout_s)


class _FunctionTalk:
    def __init__(self, function: Callable[..., Any], task: Task, messages: Sequence[Message], timeout_s: float) -> None:
        self._function, self._task, self._messages, self._timeout_s = function, task, messages, timeout_s

    async def reply(self, message: Message) -> StepResult:  # noqa: ARG002 - it is the last of the messages
        name = str(getattr(self._function, "__name__", type(self._function).__name__))
        row = copy.deepcopy(self._task.row)  # all rollouts of the task share it
        answer = await guarded(name, self._function, list(self._messages), row, timeout_s=self._timeout_s)
        return user_answer(answer, name)

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
        await self.environment.close()


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
