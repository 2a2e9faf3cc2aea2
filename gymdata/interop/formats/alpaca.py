"""Alpaca's rows: an instruction, an input and an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format

if TYPE_CHECKING:
    from gymdata.interop.importing import Columns, Importing


@FORMATS.register("alpaca")
class Alpaca(Format):
    """``instruction`` (with ``input`` below it), ``output``; LLaMA-Factory's ``system`` and ``history``."""

    content = "Alpaca rows"
    item = "an Alpaca row"
    marks = (b'"instruction"',)
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        return isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str)

    def row(self, item: Any, importing: Importing) -> Columns:
        from gymdata.interop.text_rows import answer, conversation, rollout_row, with_system

        before = [
            {"role": role, "content": text}
            for exchange in item.get("history") or ()
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]
        question = {"role": "user", "content": instruction(item)}
        prompt = with_system(item.get("system"), conversation([*before, question], "history"))
        texts = ("instruction", "input", "output", "system", "history")
        return rollout_row(item, prompt, answer(item["output"], "output"), importing, texts=texts)


def instruction(row: Mapping[str, Any]) -> str:
    """The user's message of a row: its instruction, and its input below it."""
    text = row.get("input")
    return f"{row['instruction']}\n\n{text}" if isinstance(text, str) and text.strip() else str(row["instruction"])
