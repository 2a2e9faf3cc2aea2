"""What an agent's function returns: None, the reward, or an object, such as a served workflow's response.

Of an object ``reward`` is the reward, and an answer that says that it failed, or that its rollout must not be trained on
(``mask_sample``), is read as such in the words of NeMo Gym; its other fields are kept with the row. ``result_json_path``
names the place in what was returned where all this is; a text there is the result that an evaluator is given.

Invariants: what was sampled is what was recorded, so no messages and no token ids are taken from an answer; an answer that
failed, or has no finite number as its reward, is a failed attempt and never a score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gymdata.errors import OutsideError, UsageError, brief
from gymdata.http import is_finite
from gymdata.rollouts.failures import failure_of, masked_extra

#: The key of a text at ``result_json_path``.
OUTPUT = "output_obj"
#: What the recorder has of its own.
_RECORDED = frozenset({"messages", "response", "responses_create_params", "tools"})
_STEP = re.compile(r"""\.(\w+)|\[(-?\d+)\]|\[(["'])(.+?)\3\]""")


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an attempt ended. ``reward``: that a function returned; ``answer``: what else it said; ``masked``: the fields of
    ``extra`` of a rollout that it took out of training."""

    exit_code: int = 0
    reward: float | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    masked: Mapping[str, Any] = field(default_factory=dict)


def json_path(text: str) -> tuple[str | int, ...]:
    """Keys and indexes of a JSON path that leads to one place: ``$``, ``$.value``, ``$['a b'][0]``. Raises UsageError."""
    steps = list(_STEP.finditer(text.removeprefix("$")))
    if not text.startswith("$") or "".join(match[0] for match in steps) != text[1:]:
        raise UsageError.bad_value("result_json_path", text, "a JSON path to one place, such as $.value or $['a'][0]")
    return tuple(match[1] or match[4] or int(match[2]) for match in steps)


def spelt(path: tuple[str | int, ...]) -> str:
    """A path as JSON path has it."""
    return "$" + "".join(f"[{step!r}]" for step in path)


def result_of(returned: Any, task: Mapping[str, Any], path: tuple[str | int, ...] = (), where: str = "") -> AgentResult:
    """The result of an attempt at ``task`` whose function, defined at ``where``, returned that. Raises
    OutsideError("agent"), or ("judge") where the answer says that its judge failed."""

    def wrong(expected: str) -> OutsideError:
        return OutsideError("agent", f"returned {brief(returned)}, expected {expected} ({where})")

    value = returned
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError) as error:
            raise wrong(f"something at {spelt(path)} (result_json_path)") from error
    if path and isinstance(value, str):
        return AgentResult(answer={OUTPUT: value})
    if value is None or is_finite(value):
        return AgentResult(reward=None if value is None else float(value))
    if not isinstance(value, Mapping):
        raise wrong("None, the reward, a finite number, or an object" + (f" at {spelt(path)}" if path else ""))
    # An answer may repeat what it was sent, which says nothing of the rollout.
    said = {key: v for key, v in value.items() if not (key in task and task[key] == v)}
    reward = value.get("reward")
    answer = {key: v for key, v in said.items() if key not in _RECORDED and key != "reward"}
    if (failure := failure_of("nemo-gym", said)) is not None:
        if not failure.is_rollout:
            text = f"answered that it failed: {failure.reason}"
            raise OutsideError("judge" if failure.kind == "judge" else "agent", text, final=failure.final)
        return AgentResult(answer=answer, masked=masked_extra(failure, {"reward": reward}))
    if reward is not None and not is_finite(reward):
        raise wrong("a finite number as reward")
    return AgentResult(reward=None if reward is None else float(reward), answer=answer)
