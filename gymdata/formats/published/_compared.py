"""Data sets of two answers to one prompt, of which people or a judge preferred one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gymdata.formats import Format, Place
from gymdata.formats.conversion.importing import ODD, BadItem, Importing, TableRow
from gymdata.formats.text.rows import answer, conversation, pair_row
from gymdata.formats.text.words import score
from gymdata.rollouts.messages import JsonObject


class Compared(Format):
    """A format of which each row is two answers and a preference. A tie is no pair: the row is left out, by name."""

    table = "pairs"
    item = "a comparison"
    holds_text = True

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        """(prompt, the two answers, preference, margin) of a row, prompt and answers as texts or messages. The preference is
        above 0 where the second answer is the better one, below 0 where it is the first."""
        raise NotImplementedError

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt, answers, preference, margin = self.compared(item)
        if not preference:
            raise BadItem("S103", "a tie: neither answer is preferred")
        sides = [answer(text, name) for text, name in zip(answers, ("first answer", "second answer"), strict=True)]
        chosen, rejected = sides[::-1] if preference > 0 else sides
        return pair_row(item, conversation(prompt, "prompt"), (chosen, rejected), importing, margin)


class Ranked(Format):
    """A format of which each row has ranked answers: the best one and each worse one are a pair."""

    table = "pairs"
    item = "a row of ranked answers"
    holds_text = True

    def ranked(self, item: JsonObject) -> Iterator[tuple[Any, Sequence[tuple[float, Any]]]]:
        """(prompt, its answers as (rank, text)) of each prompt of a row; the prompt is text or messages, the lowest rank is
        the best."""
        raise NotImplementedError

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        for (_, number), item in super().items(value):
            try:
                pairs = [
                    {"prompt": prompt, "chosen": better, "rejected": worse}
                    for prompt, answers in (self.ranked(item) if isinstance(item, dict) else ())
                    for rank, better in answers
                    for lower, worse in answers
                    if lower > rank == min(rank for rank, _ in answers)
                ]
            except (BadItem, *ODD) as error:
                yield (0, number), BadItem.of(error)
                continue
            if not pairs and isinstance(item, dict):
                item = BadItem("S103", "no two answers of different rank, so none is preferred")
            yield from (((n, number), pair) for n, pair in enumerate(pairs or [item]))

    def row(self, item: Any, importing: Importing) -> TableRow:
        sides = answer(item["chosen"], "chosen"), answer(item["rejected"], "rejected")
        return pair_row(item, conversation(item["prompt"], "prompt"), sides, importing)


def finite(item: JsonObject, name: str) -> float:
    """The number of a column. Raises BadItem for anything else."""
    number = score(item.get(name), name)
    if number is None or not math.isfinite(number):
        raise BadItem("S102", f"{name}: got {item.get(name)!r:.100}, expected a number")
    return number
