"""ShareGPT's conversations: messages with ``from`` and ``value``."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing, JsonObject, TableRow
from gymdata.formats.text.rows import column, conversation, ends_with_answer, in_context, rollout_row
from gymdata.formats.trl import BESIDE

_NAMES = ("conversations", "conversation")


@FORMATS.register("sharegpt")
class ShareGpt(Format):
    """``conversations`` with ``from`` (human, gpt, system, function_call, observation) and ``value``, or with ``role`` and
    ``content``; ``system`` and ``tools`` beside it."""

    content = "ShareGPT conversations"
    item = "a conversation"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        return any(ends_with_answer(row.get(name)) for name in _NAMES) and "chosen" not in row

    def row(self, item: Any, importing: Importing) -> TableRow:
        name = column(item, *_NAMES)
        messages = in_context(item, conversation(item[name], name))
        return rollout_row(item, [], messages, importing, texts=(name, *BESIDE))
