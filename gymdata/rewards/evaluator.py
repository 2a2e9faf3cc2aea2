"""An evaluator of the NeMo Agent Toolkit as a reward: the ``score`` of what its ``async evaluate_item(item)`` returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymdata.errors import RewardError
from gymdata.rewards.port import Value, View
from gymdata.rewards.user import UserReward
from gymdata.rollouts.messages import Message
from gymdata.user_code import place_of


@dataclass(frozen=True, slots=True)
class EvaluatedItem:
    """A rollout, named as the toolkit's ``EvalInputItem``: the task's ``id`` or task_id, its text prompt or the text of the
    last message before the first generated one, its ``answer``, the text that an agent returned or else that of the last
    generated message, and its row."""

    id: Any
    input_obj: Any
    expected_output_obj: Any
    output_obj: Any
    full_dataset_entry: dict[str, Any]
    messages: list[Message] = field(repr=False)

    @property
    def trajectory(self) -> list[Any]:
        """Not available. Raises LookupError."""
        raise LookupError("item.trajectory: gymdata keeps messages, not intermediate steps: read item.messages")


class EvaluatorReward(UserReward):
    """As many items as the evaluator's ``max_concurrency`` are evaluated together."""

    function: Any

    def _read_signature(self) -> None:
        if isinstance(most := getattr(self.function, "max_concurrency", None), int) and most > 0:
            self.concurrent = most
        self._defined = place_of(inspect.unwrap(type(self.function).evaluate_item))

    def call(self, rollouts: Sequence[View]) -> Any:
        (rollout,) = rollouts
        row, prompt = dict(rollout["task"]), rollout["task"].get("prompt")
        if not isinstance(prompt, str):
            prompt = rollout["prompt"][-1].get("content") if rollout["prompt"] else None
        output = rollout["text"] if rollout.get("output_obj") is None else rollout["output_obj"]
        given = _item_id(row), prompt, row.get("answer"), output, row, rollout["messages"]
        return self.function.evaluate_item(EvaluatedItem(*copy.deepcopy(given)))

    def value_of(self, value: Any, rollout: View) -> Value:
        if not hasattr(value, "score"):
            got = type(value).__name__
            raise RewardError(f"{self.name} gave a {got}, expected an output with a score ({self._defined})")
        reason = getattr(value, "reasoning", None)
        # The toolkit hands on a score of 0 beside either of these.
        if failed := getattr(value, "error", None) or (isinstance(reason, Mapping) and reason.get("error")):
            raise RewardError(f"{self.name}: {failed} ({self._defined})")
        scored, item = getattr(value, "id", None), _item_id(rollout["task"])
        if scored not in (None, item):
            raise RewardError(f"{self.name} gave the score of {scored!r}, expected that of {item!r} ({self._defined})")
        return super().value_of(value.score, rollout)


def _item_id(task: Mapping[str, Any]) -> Any:
    return task.get("id", task.get("task_id"))
