"""Trajectories of ART."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.formats.text.rows import conversation, first_row, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.failures import says_nothing
from gymdata.rollouts.messages import object_of


@FORMATS.register("art")
class Art(Format):
    """ART's groups of trajectories: ``messages_and_choices``, ``reward``, ``metrics`` as named rewards, ``metadata``;
    ``exceptions`` of a group are failed attempts. ART keeps the ids of a choice without those of its prompt: they are
    not read. Logs are not read; a trajectory with additional histories is refused."""

    content = "trajectories of ART"
    several = "trajectories"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        trajectory = first_row(row["trajectories"]) if isinstance(row.get("trajectories"), list) else row
        return {"messages_and_choices", "reward"} <= trajectory.keys()

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        for n, group in enumerate(value if isinstance(value, list) else [value]):
            place = f"row {n}: " if isinstance(value, list) else ""
            exceptions = group.get("exceptions") or [] if isinstance(group, dict) else []
            failed = [{"exception": exception} for exception in exceptions if not says_nothing(exception)]
            read = [] if failed and not group.get(self.several) else super().items(group)
            yield from ((place, item) for item in (*(item for _, item in read), *failed))

    def row(self, item: Any, importing: Importing) -> TableRow:
        if item.get("additional_histories"):
            raise BadItem("S102", "additional_histories: got several conversations, expected one")
        reward = score(item["reward"], "reward")
        if reward is None:
            raise BadItem.value("reward", item["reward"], "a number")
        steps = item["messages_and_choices"]
        importing.unread["token ids in the `logprobs`"] += any(_has_ids(step) for step in steps)
        messages = [step["message"] if isinstance(step, dict) and "message" in step else step for step in steps]
        input_flags = [isinstance(step, dict) and "message" not in step for step in steps]
        # Answers that the model sampled are choices; others were given, unless there is no choice at all.
        if not all(input_flags):
            messages = [
                message | {"weight": 0} if is_input and message.get("role") == "assistant" else message
                for message, is_input in zip(messages, input_flags, strict=True)
            ]
        metrics = item.get("metrics") or {}
        ends = [step.get("finish_reason") for step in steps if isinstance(step, dict) and "message" in step]
        return rollout_row(
            item,
            [],
            conversation(messages, "messages_and_choices"),
            importing,
            reward=reward,
            rewards=named_scores(metrics),
            texts=("messages_and_choices", "reward", "metrics", "logs", "additional_histories"),
            about=("start_time", "metrics"),
            truncated=ends[-1:] == ["length"],
        )


def _has_ids(step: Any) -> bool:
    """Whether a choice names its tokens as ids (vLLM's ``return_tokens_as_token_ids``)."""
    first = first_row(object_of(object_of(step).get("logprobs")).get("content"))
    return str(first.get("token")).startswith("token_id:")
