"""One answer, and the episode is over. The task's own tools, if any, are shown to the policy but never called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymdata.environments.port import StepResult
from gymdata.rollouts.messages import Message, Task

_DONE = StepResult(done=True)


class SingleTurn:
    """An environment without an inside."""

    identity: Mapping[str, Any] = {"name": "single_turn"}

    async def start(self, task: Task, rollout_index: int) -> SingleTurnEpisode:  # noqa: ARG002 - the port's signature
        return SingleTurnEpisode(task)

    async def close(self) -> None: ...


class SingleTurnEpisode:
    """Over after one message."""

    __slots__ = ("messages", "tools")

    def __init__(self, task: Task) -> None:
        self.messages: list[Message] = task.messages
        self.tools: list[dict[str, Any]] | None = task.tools

    async def step(self, message: Message) -> StepResult:  # noqa: ARG002 - any answer ends it
        return _DONE

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> None:  # noqa: ARG002 - likewise
        return None

    async def close(self) -> None: ...
