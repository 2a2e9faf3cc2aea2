"""Ranked answers of Nectar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.formats import FORMATS, Format, Place
from gymdata.formats.conversion.importing import ODD, BadItem, Importing, TableRow
from gymdata.formats.text.rows import answer, conversation, first_row, pair_row
from gymdata.formats.text.words import finite
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("nectar")
class Nectar(Format):
    """Nectar: ``prompt`` as HH-RLHF writes it, and ``answers`` with a ``rank``: a pair of the best answer and each worse
    one. A rank is no margin; what is known of two worse answers, and which models they are of, is lost."""

    table = "pairs"
    content = "ranked answers of Nectar"
    item = "a row of ranked answers"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        return isinstance(row.get("prompt"), str) and {"answer", "rank"} <= first_row(row.get("answers")).keys()

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        for (_, number), row in super().items(value):
            try:
                pairs: list[Any] = _pairs(row) if isinstance(row, dict) else [row]
            except (BadItem, *ODD) as error:
                pairs = [BadItem.of(error)]
            yield from (((n, number), pair) for n, pair in enumerate(pairs))

    def row(self, item: Any, importing: Importing) -> TableRow:
        sides = answer(item["chosen"], "chosen"), answer(item["rejected"], "rejected")
        return pair_row(item, conversation(item["prompt"], "prompt"), sides, importing)


def _pairs(row: JsonObject) -> list[JsonObject]:
    """The best answer with each worse one. Raises BadItem where there is none."""
    ranked = [(finite(answered, "rank"), answered["answer"]) for answered in row["answers"]]
    best = min((rank for rank, _ in ranked), default=0.0)
    pairs = [
        {"prompt": row["prompt"], "chosen": better, "rejected": worse}
        for rank, better in ranked
        for lower, worse in ranked
        if lower > rank == best
    ]
    if not pairs:
        raise BadItem("S103", "no two answers of different rank, so none is preferred")
    return pairs
