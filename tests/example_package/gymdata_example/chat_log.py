"""Chat logs: ``{"asked": …, "answered": …, "stars": …}`` a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymdata.formats import FORMATS, Format

if TYPE_CHECKING:
    from gymdata.formats.conversion.importing import Importing


@FORMATS.register("chat-log")
class ChatLog(Format):
    """One question, one answer and its stars per line."""

    content = "chat logs"
    suffixes = (".jsonl",)
    holds_reward = True

    def recognise(self, value: Any) -> bool:
        return isinstance(value, dict) and {"asked", "answered"} <= value.keys()

    def row(self, item: Any, importing: Importing) -> dict[str, Any]:
        from gymdata.formats.conversion.importing import BadItem
        from gymdata.formats.conversion.rows import foreign_row, message_of

        if not isinstance(item.get("answered"), str):
            raise BadItem("S102", f"answered: got {item.get('answered')!r}, expected text")
        messages = [message_of("user", item["asked"]), message_of("assistant", item["answered"])]
        return foreign_row(item, messages, importing, reward=item.get("stars"))

    def write(self, row: Mapping[str, Any], lost: Counter[str]) -> bytes | None:
        from gymdata.store.lines import encode

        texts = [message["content"] for message in row["messages"]]
        if len(texts) != 2:
            lost["rollouts of more than one question (left out)"] += 1
            return None
        lost["token ids and log-probabilities"] += row["n_turns"] > 0
        return encode({"asked": texts[0], "answered": texts[1], "stars": row["reward"]}) + b"\n"
