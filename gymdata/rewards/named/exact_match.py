"""The reward ``exact_match``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymdata.rewards.named import REWARDS, NamedReward, answers_of


@REWARDS.register("exact_match")
class ExactMatch(NamedReward):
    """The last message is the answer, white space at its ends aside."""

    needs = "the task column `answer`"
    column = "answer"
    quick = True

    def check(self, text: str, task: Mapping[str, Any]) -> float | None:
        answers = answers_of(task)
        return None if answers is None else float(text.strip() in [a.strip() for a in answers])
