"""Alpaca's rows: an instruction, an input and an output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.formats.trl import BESIDE

if TYPE_CHECKING:
    from gymdata.interop.importing import Importing, TableRow

_ANSWERS = ("output", "response")


@FORMATS.register("alpaca")
class Alpaca(Format):
    """``instruction`` (with ``input`` below it), ``output``; LLaMA-Factory's ``system`` and ``history``. Also read: Dolly's
    ``context`` and ``response``."""

    content = "Alpaca rows"
    item = "an Alpaca row"
    marks = (b'"instruction"',)
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        answers = any(isinstance(row.get(name), str) for name in _ANSWERS)
        others = {"rejected", "messages", "conversations"}  # of which the instruction is only a part
        return answers and isinstance(row.get("instruction"), str) and others.isdisjoint(row)

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.interop.text_rows import answer, column, conversation, in_context, instruction, rollout_row

        name = column(item, *_ANSWERS)
        prompt = in_context(item, conversation(instruction(item), "instruction"))
        texts = (name, "instruction", "input", "context", *BESIDE)
        return rollout_row(item, prompt, answer(item[name], name), importing, texts=texts)
