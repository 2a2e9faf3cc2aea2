"""Conversations without roles: texts in turn, or pairs of an input and an output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format

if TYPE_CHECKING:
    from gymdata.interop.importing import Importing, TableRow

_NAMES = ("conversations", "conversation")


@FORMATS.register("lima")
class Lima(Format):
    """LIMA's ``conversations``: texts of the user and the assistant in turn."""

    content = "conversations of LIMA"
    item = "a conversation"
    marks = (b'"conversations"', b'"conversation"')
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        texts = next((row[name] for name in _NAMES if row.get(name)), None)
        return isinstance(texts, list) and len(texts) > 1 and all(isinstance(text, str) for text in texts)

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.interop.text_rows import column, conversation, rollout_row

        name = column(item, *_NAMES)
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(item[name])]
        return rollout_row(item, [], conversation(messages, name), importing, texts=(name,))


@FORMATS.register("capybara")
class Capybara(Format):
    """Capybara's ``conversation``: exchanges of ``input`` and ``output``."""

    content = "conversations of Capybara"
    item = "a conversation"
    marks = (b'"conversations"', b'"conversation"')
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        exchanges = next((row[name] for name in _NAMES if row.get(name)), None)
        first = exchanges[0] if isinstance(exchanges, list) and exchanges else None
        return isinstance(first, dict) and {"input", "output"} <= first.keys() and "role" not in first

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.interop.text_rows import column, conversation, rollout_row

        name = column(item, *_NAMES)
        messages = [
            {"role": role, "content": exchange[text]}
            for exchange in item[name]
            for role, text in (("user", "input"), ("assistant", "output"))
        ]
        return rollout_row(item, [], conversation(messages, name), importing, texts=(name,))
