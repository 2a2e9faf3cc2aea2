"""The one place that decides how a rollout ended.

| what happened | outcome | stop_reason |
| --- | --- | --- |
| the environment says that it is over | completed | what the environment says, or null |
| a turn reached ``--max-tokens`` | truncated | ``max_tokens`` |
| the engine ended a turn that only repeats itself | truncated | ``repetition`` |
| prompt and generation reached the context limit | truncated | ``max_context`` |
| ``--max-turns`` model calls, and the environment would go on | truncated | ``max_turns`` |
| ``--time-limit`` seconds passed | truncated | ``time_limit`` |
| the engine raised, or aborted a request that we did not cancel | failed, kind ``engine`` | |
| the environment raised or hung, its verdict included | failed, kind ``environment`` | |
| the verdict says that the environment, or its judge, failed | failed, kind ``environment`` or ``judge`` | |
| the time limit passed before the environment had given a first prompt | failed, kind ``environment`` | |
| the first prompt leaves no room for a single token | failed, kind ``environment`` | |
| the chat template refuses the conversation, or rewrites what came before | failed, kind ``engine`` | |
| the time limit passed while the server could not be reached | failed, kind ``engine`` | |
| an agent ended with an exit code other than 0 after a model call | truncated | ``exit_N`` |
| an agent called no model, was ended by a signal, raised, or cannot be run | failed, kind ``agent`` | |
| an agent's answer says that it, or its judge, failed | failed, kind ``agent`` or ``judge`` | |
| ``--agent-timeout`` seconds of an agent passed | failed, kind ``agent`` | |
| the last model call of an agent failed in the engine | failed, kind ``engine`` | |
| the user quit (second Ctrl-C) | nothing is kept: the rollout is pending | |

Invariants: limits truncate and are never failures; a failure is no rollout and has no reward; completed and
truncated rollouts are scored alike, because a policy that never ends must be able to learn that. A failed attempt counts
towards ``--max-attempts`` unless the engine died or the environment cannot be reached: then every rollout in flight fails
at once, through no fault of its own. A reward function that raises does not make a failure either: the tokens are good, so
the rollout is kept unscored (reward null), the fault is recorded in failures.jsonl, and ``gymdata score`` can mend it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gymdata.environments.port import StepResult
from gymdata.errors import GymdataError, OutsideError

#: What is at fault for an attempt.
Kind = Literal["engine", "environment", "agent", "judge"]
COMPLETED = "completed"
TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a rollout, by the names of the settings; ``max_context`` None: no limit is known."""

    max_tokens: int
    max_turns: int
    max_context: int | None = None
    time_limit: float | None = None
    #: The name of the setting that ``max_context`` comes from.
    limited_by: str | None = None

    def room(self, prompt_length: int) -> int:
        """Tokens that the next generation may have; below 1 there is no next generation."""
        if self.max_context is None:
            return self.max_tokens
        return min(self.max_tokens, self.max_context - prompt_length)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended that becomes a row."""

    status: str
    stop_reason: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed and becomes no row. ``fatal``: engine or environment is gone, and the attempt does not
    count; ``final``: another attempt would fail in the same way, so none is made unless more attempts are allowed."""

    kind: Kind
    phase: str
    message: str
    fatal: bool = False
    hint: str | None = None
    final: bool = False


TIME_LIMIT = Outcome(TRUNCATED, "time_limit")
NO_ROOM = Outcome(TRUNCATED, "max_context")


def after_generation(finish_reason: str, n_generated: int, limits: Limits) -> Outcome | None:
    """Decide after a model call; None = the message goes to the environment. Raises OutsideError for an abort."""
    if finish_reason == "stop":
        return None
    if finish_reason == "length":
        return Outcome(TRUNCATED, "max_tokens" if n_generated >= limits.max_tokens else "max_context")
    if finish_reason == "repetition":
        return Outcome(TRUNCATED, finish_reason)
    raise OutsideError("engine", f"the request ended with finish_reason {finish_reason!r} after {n_generated} tokens")


def after_step(step: StepResult, n_turns: int, limits: Limits) -> Outcome | None:
    """Decide after the environment answered; None = another turn."""
    if step.done or not step.messages:
        return Outcome(COMPLETED, step.stop_reason)
    if n_turns >= limits.max_turns:
        return Outcome(TRUNCATED, "max_turns")
    return None


def no_room_at_start(prompt_length: str, limits: Limits) -> Failure:
    """The task itself does not fit: no tokens can be sampled, so there is no rollout to keep, and there never will be."""
    limit = f"{limits.limited_by or 'the context limit'} is {limits.max_context:,}"
    return Failure(
        "engine",
        "prompt",
        f"engine: the prompt has {prompt_length} tokens and leaves no room to generate: {limit}",
        final=True,
    )


def unwritable(error: GymdataError, phase: str | None) -> Failure:
    """The chat template makes no prompt of the conversation; without a ``phase``, of that which the rollout begins with."""
    return Failure("engine", phase or "prompt", f"engine: {error.message}", hint=error.hint, final=phase is None)


def start_took_too_long(limits: Limits) -> Failure:
    """The time limit passed before there was a prompt: nothing was requested of the policy."""
    return Failure("environment", "environment start", f"environment: gave no prompt within {limits.time_limit:g} s")


def server_was_gone(limits: Limits, phase: str) -> Failure:
    """The time limit passed while the server could not be reached, which is no fault of the policy."""
    return Failure("engine", phase, f"engine: unreachable when the {limits.time_limit:g} s limit passed")


def failure(error: OutsideError, phase: str) -> Failure:
    """An outside fault in ``phase`` (turn k, environment start, …)."""
    kinds: dict[str, Kind] = {"engine": "engine", "agent": "agent", "judge": "judge"}
    return Failure(kinds.get(error.system, "environment"), phase, error.message, error.fatal, error.hint, error.final)
