"""Battles of Chatbot Arena, and other judgements of two models' conversations."""

from __future__ import annotations

import json
import math
from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.text.rows import pair_row
from gymdata.formats.trl import prompt_and_sides
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import truth

_WINNERS = ("winner_model_a", "winner_model_b", "winner_tie")


@FORMATS.register("arena")
class Arena(Format):
    """Battles of Chatbot Arena (also of MT-Bench): ``conversation_a``, ``conversation_b`` and ``winner``, or ``prompt``,
    ``response_a``, ``response_b`` as JSON text with ``winner_model_a``. What both conversations share before an answer is
    the prompt. A tie is left out, by name; which models they were is not read."""

    table = "pairs"
    content = "battles of Chatbot Arena"
    item = "a battle"
    holds_text = True
    keys = (
        {"conversation_a", "conversation_b", "winner"},
        {"prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"},
    )

    def row(self, item: Any, importing: Importing) -> TableRow:
        winners = [item.get("winner")] if "winner" in item else [n for n in _WINNERS if truth(item.get(n))]
        winner = winners[0] if len(winners) == 1 else winners
        if not isinstance(winner, str):
            raise BadItem("S102", f"winner: got {winner!r:.100}, expected model_a or model_b")
        name = winner.removeprefix("winner_")
        if name not in ("model_a", "model_b"):
            raise BadItem("S103", f"winner: {name}, so neither answer is preferred")
        sides = ("a", "b") if name == "model_a" else ("b", "a")
        conversations = [_conversation(item, side) for side in sides]
        prompt, *answers = prompt_and_sides(dict(zip(("chosen", "rejected"), conversations, strict=True)))
        return pair_row(item, prompt, (answers[0], answers[1]), importing, math.nan)


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
