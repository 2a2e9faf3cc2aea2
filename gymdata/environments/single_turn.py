"""One answer, and the episode is over unless there is a user. The task's own tools, if any, are shown to the policy but
never called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymdata.environments.port import StepResult, Talk, Verdict
from gymdata.rollouts.messages import Message, Task, ToolDefinition

_DONE = StepResult(done=True)


class SingleTurn:
    """An environment without an inside."""

    identity: Mapping[str, Any] = {"name": "single_turn"}

    async def start(self, task: Task, rollout_index: int) -> SingleTurnEpisode:  # noqa: ARG002 - the port's signature
        return SingleTurnEpisode(task)

    async def close(self) -> None: ...


class SingleTurnEpisode:
    """Over after one message, or when the user says so."""

    __slots__ = ("messages", "tools", "user")
    rewards_steps = False

    def __init__(self, task: Task) -> None:
        self.messages: list[Message] = task.messages
        self.tools: list[ToolDefinition] | None = task.tools
        self.user: Talk | None = None

    async def step(self, message: Message) -> StepResult:
        return _DONE if self.user is None else await self.user.reply(message)

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict | None:  # noqa: ARG002 - likewise
        return None

    async def close(self) -> None: ...
