"""Alpaca's rows: an instruction, an input and an output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.formats import FORMATS, Format, Place
from gymdata.formats.conversion.importing import Importing, TableRow
from gymdata.formats.text.rows import answer, as_text, column, conversation, in_context, instruction, rollout_row
from gymdata.formats.trl import BESIDE
from gymdata.rollouts.messages import JsonObject

_ANSWERS = ("output", "response")


@FORMATS.register("alpaca")
class Alpaca(Format):
    """``instruction`` (with ``input`` below it), ``output``; LLaMA-Factory's ``system`` and ``history``. Also read: Dolly's
    ``context`` and ``response``, and Self-Instruct's ``instances``, each a row."""

    content = "Alpaca rows"
    item = "an Alpaca row"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        answers = any(isinstance(as_text(row.get(name)), str) for name in _ANSWERS) or _instances(row)
        chat_columns = {"rejected", "messages", "conversations"}  # of which the instruction is only a part
        return bool(answers) and isinstance(row.get("instruction"), str) and chat_columns.isdisjoint(row)

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        for (_, number), item in super().items(value):
            about = {k: v for k, v in item.items() if k != "instances"} if isinstance(item, dict) else item
            instances = _instances(item) if isinstance(item, dict) else []
            yield from (((n, number), about | instance) for n, instance in enumerate(instances))
            if not instances:
                yield (0, number), item

    def row(self, item: Any, importing: Importing) -> TableRow:
        name = column(item, *_ANSWERS)
        prompt = in_context(item, conversation(instruction(item), "instruction"))
        texts = (name, "instruction", "input", "context", *BESIDE)
        return rollout_row(item, prompt, answer(as_text(item[name]), name), importing, texts=texts)


def _instances(row: JsonObject) -> list[JsonObject]:
    """The inputs and outputs of a row of Self-Instruct."""
    instances: Any = row.get("instances")
    answered = isinstance(instances, list) and all(isinstance(row, dict) and "output" in row for row in instances)
    return instances if answered else []
