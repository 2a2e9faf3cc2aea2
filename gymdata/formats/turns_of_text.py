"""Conversations without roles: texts in turn, or pairs of an input and an output."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing, JsonObject, TableRow
from gymdata.formats.text.rows import BESIDE, column, conversation, in_context, rollout_row
from gymdata.rollouts.column_names import CONVERSATIONS

_EXCHANGES = ({"input", "output"}, {"human", "assistant"})


@FORMATS.register("lima")
class Lima(Format):
    """LIMA's ``conversations``: texts of the user and the assistant in turn."""

    content = "conversations of LIMA"
    item = "a conversation"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        texts = next((row[name] for name in CONVERSATIONS if row.get(name)), None)
        return isinstance(texts, list) and len(texts) > 1 and all(isinstance(text, str) for text in texts)

    def row(self, item: Any, importing: Importing) -> TableRow:
        name = column(item, *CONVERSATIONS)
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(item[name])]
        return rollout_row(item, [], conversation(messages, name), importing, texts=(name,))


@FORMATS.register("capybara")
class Capybara(Format):
    """Capybara's ``conversation``: exchanges of ``input`` and ``output``, or of ``human`` and ``assistant`` (ms-swift);
    ``system`` in an exchange (XTuner) or beside them."""

    content = "conversations of Capybara"
    item = "a conversation"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        exchanges = next((row[name] for name in CONVERSATIONS if row.get(name)), None)
        first = exchanges[0] if isinstance(exchanges, list) and exchanges else None
        return isinstance(first, dict) and any(names <= first.keys() for names in _EXCHANGES) and "role" not in first

    def row(self, item: Any, importing: Importing) -> TableRow:
        name = column(item, *CONVERSATIONS)
        messages = []
        for exchange in item[name]:
            if exchange.get("system"):
                messages.append({"role": "system", "content": exchange["system"]})
            user, assistant = ("human", "assistant") if "human" in exchange else ("input", "output")
            messages += [{"role": "user", "content": exchange[user]}] if exchange[user] != "" else []
            more = {k: v for k, v in exchange.items() if k not in ("system", user, assistant)}
            messages.append({**more, "role": "assistant", "content": exchange[assistant]})
        written = in_context(item, conversation(messages, name))
        return rollout_row(item, [], written, importing, texts=(name, *BESIDE))
