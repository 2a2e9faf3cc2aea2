"""The reward ``exact_match``."""

from __future__ import annotations

from gymdata.rewards.named import REWARDS, NamedReward, answers_of
from gymdata.rewards.port import TaskRow


@REWARDS.register("exact_match")
class ExactMatch(NamedReward):
    """The last message is the answer, white space at its ends aside."""

    needs = "the task column `answer`"
    column = "answer"
    quick = True

    def check(self, text: str, task: TaskRow) -> float | None:
        answers = answers_of(task)
        return None if answers is None else float(text.strip() in [a.strip() for a in answers])
