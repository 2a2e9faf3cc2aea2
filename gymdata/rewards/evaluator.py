"""Evaluators of the NeMo Agent Toolkit as rewards: a class with ``evaluate_item`` or ``evaluate``, as published.

``async evaluate_item(item) -> output`` is called for each rollout; a class that has ``async evaluate(eval_input) ->
eval_output`` alone is given one rollout at a time. ``output.score`` is the value. Either method may be a plain one.

| field of an item | what it is |
| --- | --- |
| ``id`` | the task's column ``id``, else its task_id |
| ``input_obj`` | the task's text prompt, else the text of the last message before the first generated one |
| ``expected_output_obj`` | the task's column ``answer`` |
| ``output_obj`` | the text of the last generated message |
| ``full_dataset_entry`` | the task's row |
| ``messages`` | the whole conversation (not of the toolkit) |
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gymdata.errors import RewardError
from gymdata.rewards.port import Value, View
from gymdata.rewards.user import UserReward
from gymdata.rollouts.messages import Message
from gymdata.user_code import place_of

_METHODS = ("evaluate_item", "evaluate")


def is_evaluator(value: Any) -> bool:
    """Whether a class or an instance has one of the two published methods."""
    return any(callable(getattr(value, name, None)) for name in _METHODS)


def needs_concurrency(kind: Any) -> bool:
    """Whether an evaluator's constructor must be given ``max_concurrency``, as the toolkit does."""
    try:
        parameter = inspect.signature(kind).parameters.get("max_concurrency")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty


@dataclass(frozen=True, slots=True)
class EvaluatedItem:
    """A rollout, with the names of the toolkit's ``EvalInputItem``."""

    id: Any
    input_obj: Any
    expected_output_obj: Any
    output_obj: Any
    full_dataset_entry: dict[str, Any]
    messages: list[Message] = field(repr=False)

    @classmethod
    def of(cls, rollout: View) -> EvaluatedItem:
        """The item of a rollout as rewards see it."""
        row = dict(rollout["task"])
        prompt = row.get("prompt")
        if not isinstance(prompt, str):
            prompt = rollout["prompt"][-1].get("content") if rollout["prompt"] else None
        return cls(
            row.get("id", row.get("task_id")), prompt, row.get("answer"), rollout["text"], row, rollout["messages"]
        )

    @property
    def trajectory(self) -> list[Any]:
        """Not available. Raises LookupError."""
        raise LookupError("item.trajectory: gymdata keeps messages, not intermediate steps: read item.messages")

    @property
    def expected_trajectory(self) -> list[Any]:
        """Not available. Raises LookupError."""
        raise LookupError("item.expected_trajectory: tasks have none here: read item.full_dataset_entry")

    def copy_with_updates(self, **updates: Any) -> EvaluatedItem:
        """A copy with other values in some fields."""
        return replace(self, **updates)


@dataclass(frozen=True, slots=True)
class EvaluatorInput:
    """The input of ``evaluate``."""

    eval_input_items: list[EvaluatedItem]


class EvaluatorReward(UserReward):
    """A ports.RewardFunction around an evaluator's instance. As many calls of ``evaluate_item`` as its ``max_concurrency``
    are awaited together."""

    def _read_signature(self) -> None:
        self.single = True
        self._takes_batch = not callable(getattr(self.function, "evaluate_item", None))
        # `evaluate` is written for one call at a time.
        most = 1 if self._takes_batch else getattr(self.function, "max_concurrency", None)
        if isinstance(most, int) and most > 0:
            self.concurrent = most
        method = inspect.unwrap(getattr(type(self.function), _METHODS[self._takes_batch]))
        self._defined = place_of(method) if hasattr(method, "__code__") else self._defined

    def call(self, rollout: View) -> Any:
        """The method's answer, or an awaitable of it."""
        item = EvaluatedItem.of(self.private_copy(rollout))
        method = getattr(self.function, _METHODS[self._takes_batch])
        return method(EvaluatorInput([item]) if self._takes_batch else item)

    def value_of(self, value: Any, rollout: View) -> Value:
        """``score`` of the answer. Raises RewardError for an answer without a score, or with an error in its place."""
        outputs = getattr(value, "eval_output_items", None) if self._takes_batch else [value]
        if not isinstance(outputs, list) or len(outputs) != 1 or not hasattr(outputs[0], "score"):
            raise RewardError(
                f"{self.name} gave a value of type {type(value).__name__}, expected one output with a score "
                f"({self._defined})"
            )
        reason = getattr(outputs[0], "reasoning", None)
        if isinstance(reason, Mapping) and reason.get("error"):
            raise RewardError(f"{self.name}: {reason['error']} ({self._defined})")
        return super().value_of(outputs[0].score, rollout)
