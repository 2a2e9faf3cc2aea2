"""UltraFeedback as it was published: several answers to an instruction, each with ratings."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing, TableRow
from gymdata.formats.text.rows import answer, conversation, first_row, refuse_empty, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("ultrafeedback")
class UltraFeedback(Format):
    """UltraFeedback (openbmb): a rollout per answer of ``completions``, of the group of its ``instruction``;
    ``overall_score`` is the reward, ratings of ``annotations`` are named rewards. `gymdata pairs` makes pairs of the groups.
    Critiques, and the system prompts that the answers were made with, are not read."""

    content = "rated answers of UltraFeedback"
    item = "a rated answer"
    several = "completions"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        rated = first_row(row.get("completions"))
        return {"response", "annotations"} <= rated.keys() and isinstance(row.get("instruction"), str)

    def item_of(self, part: Any, document: JsonObject) -> Any:
        return {k: v for k, v in document.items() if k not in ("completions", "models")} | {"answer": part}

    def row(self, item: Any, importing: Importing) -> TableRow:
        rated = item["answer"]
        ratings = {name: _rating(a) for name, a in (rated.get("annotations") or {}).items()}
        written = answer(rated["response"], "response")
        refuse_empty(written, "response")
        return rollout_row(
            item,
            conversation(item["instruction"], "instruction"),
            written,
            importing,
            reward=score(rated.get("overall_score"), "overall_score"),
            rewards=named_scores(ratings),
            texts=("instruction", "answer"),
            policy=rated.get("model"),
        )


def _rating(annotation: Any) -> Any:
    """The number of a rating, which is text; None where it does not apply."""
    rating = annotation.get("Rating") if isinstance(annotation, dict) else None
    return None if rating == "N/A" else rating
