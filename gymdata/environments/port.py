"""Where rollouts happen: the protocols of environments and their episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gymdata.rollouts.messages import Message, Task, ToolDefinition
from gymdata.store.paths import Identity


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to an assistant message: messages to continue with, or none when the episode is
    over."""

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """An environment's verdict on a rollout. ``reward`` None: it did not score it; ``extra``: all other fields.
    ``last_step``: the verdict is on the last turn only, and its reward is added to that turn's. ``masked``: what the row's
    ``extra`` says of a rollout that the environment took out of training (``failure``, ``unscored``); it has no reward."""

    reward: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    last_step: float | None = None
    masked: Mapping[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One rollout's life inside an environment."""

    tools: list[ToolDefinition] | None
    messages: list[Message]

    # Environments that are given as objects may lack ``user: Talk | None`` (who answers in its place where no tool is
    # called) and ``rewards_steps`` (without another reward, a rollout has the sum of its steps, 0 without any).

    async def step(self, message: Message) -> StepResult:
        """Raises OutsideError("environment", …) when the environment, not the policy, is at fault."""
        ...

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict | None:
        """Called once when a rollout ended, completed or truncated (``stop_reason``: the limit); None: no verdict.

        ``messages``: the whole conversation. Raises OutsideError("environment", …): then the rollout failed."""
        ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """Where rollouts happen. ``identity`` goes to run.json; a change of it is another run."""

    identity: Identity

    async def start(self, task: Task, rollout_index: int) -> Episode: ...

    async def close(self) -> None: ...


class Talk(Protocol):
    """A user in one rollout."""

    async def reply(self, message: Message) -> StepResult:
        """To a message of the policy that calls no tool; ``done`` when the user has no more to say.

        Raises OutsideError("environment", …)."""
        ...

    async def close(self) -> None: ...
