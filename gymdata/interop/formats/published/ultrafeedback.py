"""UltraFeedback as it was published: several answers to an instruction, each with ratings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.interop.formats import FORMATS, Format, Place
from gymdata.interop.importing import Importing, TableRow
from gymdata.interop.text_rows import answer, conversation, first_row, number_of, numbers_of, rollout_row


@FORMATS.register("ultrafeedback")
class UltraFeedback(Format):
    """UltraFeedback (openbmb): a rollout per answer of ``completions``, of the group of its ``instruction``;
    ``overall_score`` is the reward, ratings of ``annotations`` are named rewards. `gymdata pairs` makes pairs of the groups.
    Critiques, and the system prompts that the answers were made with, are not read."""

    content = "rated answers of UltraFeedback"
    item = "a rated answer"
    marks = (b'"completions"',)
    holds_text = holds_reward = True

    def recognise(self, value: Any) -> bool:
        row = first_row(value)
        rated = first_row(row.get("completions"))
        return {"response", "annotations"} <= rated.keys() and isinstance(row.get("instruction"), str)

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        for (_, number), item in super().items(value):
            answers = item.get("completions") if isinstance(item, dict) else None
            if not isinstance(answers, list) or not answers:
                yield (0, number), item
                continue
            about = {name: column for name, column in item.items() if name not in ("completions", "models")}
            yield from (((k, number), about | {"answer": answer}) for k, answer in enumerate(answers))

    def row(self, item: Any, importing: Importing) -> TableRow:
        rated = item["answer"]
        ratings = {name: _rating(a) for name, a in (rated.get("annotations") or {}).items()}
        return rollout_row(
            item,
            conversation(item["instruction"], "instruction"),
            answer(rated["response"], "response"),
            importing,
            reward=number_of(rated, "overall_score"),
            rewards=numbers_of(ratings, ratings),
            texts=("instruction", "answer"),
            policy=rated.get("model"),
        )


def _rating(annotation: Any) -> float | None:
    """The number of a rating, which is text; None where it does not apply."""
    text = annotation.get("Rating") if isinstance(annotation, dict) else None
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None
