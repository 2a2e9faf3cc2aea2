"""Published data sets of trajectories on SWE-bench-like tasks."""

from __future__ import annotations

from typing import Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import Importing, JsonObject, TableRow
from gymdata.interop.text_rows import conversation, first_row, rollout_row
from gymdata.interop.words import score

_ABOUT = ("exit_status", "generated_patch", "model_patch", "eval_logs", "trajectory_id")


@FORMATS.register("swe-trajectories")
class SweTrajectories(Format):
    """Rows of an ``instance_id`` and a ``trajectory`` of messages, with ``tools``, as SWE-rebench publishes those of
    OpenHands and SWE-agent (roles ``ai``, texts in ``text`` and ``system_prompt``). ``resolved`` or ``target`` is the
    reward."""

    content = "published trajectories of coding agents"
    item = "a trajectory"
    marks = (b'"trajectory"',)
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        return "role" in first_row(row.get("trajectory")) and isinstance(row.get("instance_id"), str)

    def row(self, item: Any, importing: Importing) -> TableRow:
        return rollout_row(
            item,
            [],
            conversation([_message(message) for message in item["trajectory"]], "trajectory"),
            importing,
            reward=score(item.get("resolved", item.get("target")), "resolved"),
            texts=("trajectory", "resolved", "target"),
            about=_ABOUT,
            group=item["instance_id"],
            policy=item.get("model_name"),
        )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if "content" in message or "tool_calls" in message:
        return message
    text = message.get("text") if message.get("text") is not None else message.get("system_prompt")
    return {"role": "assistant" if message["role"] == "ai" else message["role"], "content": text}
