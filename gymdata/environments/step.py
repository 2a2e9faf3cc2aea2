"""Converts what user code returns at a step of a rollout (text, messages, or a ``Step`` with a reward) to the port's
types.

Invariants: a message is one that a chat template can render and a file can hold; only the policy writes assistant
messages; any other value is the environment's fault and never a message or a reward.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymdata.environments.port import StepResult
from gymdata.environments.tool_error import as_text, clean
from gymdata.errors import OutsideError, brief
from gymdata.rollouts.messages import Message, ToolCall
from gymdata.user_code import called, raised_at

#: The stop reason when an environment returns ``done`` without one.
DONE = "environment_done"
#: Roles of messages between two turns of the policy, besides tool results.
_SPEAKERS = ("user", "system", "environment")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a rollout: what a tool, ``respond`` or ``step_reward`` may return in place of its plain value.

    ``content``: what it would return without this class. ``reward`` belongs to the turn of the policy that led to the step
    (None: no reward). ``done`` ends the rollout, completed, with ``stop_reason`` (default: ``environment_done``).
    """

    content: Any = None
    reward: float | None = None
    done: bool = False
    stop_reason: str | None = None

    @property
    def ended(self) -> str | None:
        """Why it ends the rollout; None when it does not."""
        return (self.stop_reason or DONE) if self.done else None


def gives_steps(function: Any) -> bool:
    """Whether a function's annotations say that it returns a ``Step``."""
    return "Step" in str(getattr(function, "__annotations__", {}).get("return", ""))


def reward_of(value: Any, source: str) -> float | None:
    """A reward as user code gives it: a finite number, or None for none. Raises OutsideError."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise OutsideError("environment", f"{source} gave {brief(value)}, expected a finite number or None")
    return number


def tool_message(call: ToolCall, content: str) -> Message:
    """The answer to a tool call."""
    name = clean(str((call.get("function") or {}).get("name")))
    answered = {"tool_call_id": call["id"]} if call.get("id") else {}
    return {"role": "tool", "name": name, "content": content, **answered}


def plus(*rewards: float | None) -> float | None:
    """The sum of the rewards that are not None; None without any."""
    numbers = [reward for reward in rewards if reward is not None]
    return sum(numbers) if numbers else None


def user_answer(value: Any, name: str) -> StepResult:
    """A user's answer as a ``StepResult``: text, a message, a list of them, a ``Step`` of these, or None to end.

    Raises OutsideError when it is something else."""
    step = value if isinstance(value, Step) else Step(value)
    replies = [] if step.content is None else step.content
    if not isinstance(replies, Sequence) or isinstance(replies, (str, bytes)):
        replies = [replies]
    messages: list[Message] = []
    for reply in replies:
        if isinstance(reply, str):
            messages.append({"role": "user", "content": as_text(reply)})
        elif isinstance(reply, Mapping) and reply.get("role") in _SPEAKERS and isinstance(reply.get("content"), str):
            messages.append({**copy.deepcopy(dict(reply)), "content": as_text(reply["content"])})
        else:
            raise OutsideError(
                "environment",
                f"{name} gave {brief(reply)}, expected text, a message with role ({', '.join(_SPEAKERS)}) and content as "
                "text, a list of these, gymdata.Step, or None",
            )
    return StepResult(messages, step.done or not messages, reward_of(step.reward, f"the reward of {name}"), step.ended)


async def guarded(name: str, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """The result of the environment's user code, which gets a copy of its arguments; any exception, and a hang, is the
    environment's fault."""
    try:
        return await asyncio.wait_for(called(function, *copy.deepcopy(arguments)), timeout_s)
    except TimeoutError as error:
        raise hung(name, timeout_s) from error
    except OutsideError:
        raise
    except Exception as error:  # user code may raise anything
        raise OutsideError.user_code(name, error, raised_at(error, function)) from error


def hung(name: str, timeout_s: float) -> OutsideError:
    """User code that gave no answer in time."""
    return OutsideError(
        "environment", f"{name} gave no answer within {timeout_s:g} s", hint="raise --tool-timeout if it needs longer"
    )
