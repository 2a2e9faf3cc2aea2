"""Rollouts of verifiers and prime-rl."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.text.rows import answer, column, conversation, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import Message
from gymdata.rollouts.truth import truth

#: Columns of the rollout, which are no fields of its task.
_ABOUT = (
    *("error", "error_chain", "long_error_chain", "is_completed", "is_truncated", "stop_condition"),
    *("metrics", "timing", "generation_ms", "scoring_ms", "total_ms", "token_usage", "advantage"),
)
_LOST = ("trajectory", "reward", "completion", "tool_defs")


@FORMATS.register("verifiers")
class Verifiers(Format):
    """``results.jsonl`` of verifiers and rollouts of prime-rl: ``prompt`` and ``completion`` (messages or text), ``reward``,
    ``metrics`` as named rewards. Ids and log-probabilities of a ``trajectory`` are not read."""

    content = "rollouts of verifiers"
    item = "a rollout of verifiers"
    holds_text = holds_reward = True
    keys = ({"example_id", "prompt", "completion", "reward"},)

    def row(self, item: Any, importing: Importing) -> TableRow:
        reward = score(item["reward"], "reward")
        if reward is None and item["reward"] is not None:
            raise BadItem.value("reward", item["reward"], "a number")
        importing.count_unread(item, "trajectory", "tokens", "prompt_ids")
        metrics = item.get("metrics")
        if not isinstance(metrics, dict):
            # Earlier versions have them beside the other columns.
            not_metrics = {"example_id", "reward", *_ABOUT}
            metrics = {name: value for name, value in item.items() if type(value) is float and name not in not_metrics}
        return rollout_row(
            item if item.get("tools") else item | {"tools": item.get("tool_defs")},
            _messages(item[column(item, "prompt")], "prompt", "user"),
            _messages(item[column(item, "completion")], "completion", "assistant"),
            importing,
            reward=reward,
            rewards=named_scores(metrics),
            texts=(*_LOST, *metrics),
            about=_ABOUT,
            truncated=truth(item.get("is_truncated")) is True,
            group="-".join(
                str(item[name]) for name in ("env_id", "task", "example_id") if isinstance(item.get(name), (str, int))
            ),
        )


def _messages(value: Any, where: str, speaker: str) -> list[Message]:
    """Messages of a prompt or a completion; text, also as messages of the role ``text``, is the speaker's."""
    if isinstance(value, list):
        texts = [isinstance(message, dict) and message.get("role") == "text" for message in value]
        value = [m | {"role": speaker} if text else m for m, text in zip(value, texts, strict=True)]
    return answer(value, where) if speaker == "assistant" and isinstance(value, str) else conversation(value, where)
