"""Battles of Chatbot Arena, and other judgements of two models' conversations."""

from __future__ import annotations

import json
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.table import Compared, Comparison
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import truth

_WINNERS = {"model_a": 0, "model_b": 1, "tie": None, "tie (bothbad)": None}
_FLAGS = ("winner_model_a", "winner_model_b", "winner_tie")


@FORMATS.register("arena")
class Arena(Comparison):
    """Battles of Chatbot Arena (also of MT-Bench): ``conversation_a``, ``conversation_b`` and ``winner``, or ``prompt``,
    ``response_a``, ``response_b`` as JSON text with ``winner_model_a``. What both conversations share before an answer is
    the prompt. A tie is left out, by name; which models they were is not read."""

    content = "battles of Chatbot Arena"
    item = "a battle"
    shapes = (Compared("", ("conversation_a", "conversation_b"), "winner", choices=_WINNERS),)

    def recognise_row(self, row: JsonObject) -> bool:
        return super().recognise_row(row) or row.keys() >= {"prompt", "response_a", "response_b", *_FLAGS[:2]}

    def row(self, item: Any, importing: Importing) -> TableRow:
        if "winner" not in item:
            flags = [name for name in _FLAGS if truth(item.get(name))]
            item = item | {"winner": flags[0].removeprefix("winner_") if len(flags) == 1 else flags}
        return super().row(item, importing)

    def texts(self, row: JsonObject, shape: Compared) -> JsonObject:
        return {path: _conversation(row, path[-1]) for path in shape.answers}


def _conversation(item: JsonObject, side: str) -> Any:
    """The messages of a side."""
    if f"conversation_{side}" in item:
        messages = item[f"conversation_{side}"]
        return json.loads(messages) if isinstance(messages, str) else messages
    prompts, answers = (
        json.loads(texts) if isinstance(texts, str) else texts for texts in (item["prompt"], item[f"response_{side}"])
    )
    if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
        raise BadItem("S102", f"response_{side}: expected one text for each of the prompts")
    return [
        {"role": role, "content": text}
        for exchange in zip(prompts, answers, strict=True)
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
