"""Ranked answers of Nectar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.published._compared import Ranked, finite
from gymdata.formats.text.rows import first_row
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("nectar")
class Nectar(Ranked):
    """Nectar: ``prompt`` as HH-RLHF writes it, and ``answers`` with a ``rank``: a pair of the best answer and each worse
    one. A rank is no margin; what is known of two worse answers, and which models they are of, is lost."""

    content = "ranked answers of Nectar"

    def recognise_row(self, row: JsonObject) -> bool:
        return isinstance(row.get("prompt"), str) and {"answer", "rank"} <= first_row(row.get("answers")).keys()

    def ranked(self, item: JsonObject) -> Iterator[tuple[Any, Sequence[tuple[float, Any]]]]:
        yield item["prompt"], [(finite(answer, "rank"), answer["answer"]) for answer in item["answers"]]
