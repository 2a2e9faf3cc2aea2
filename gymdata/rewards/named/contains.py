"""The reward ``contains``."""

from __future__ import annotations

from gymdata.rewards.named import REWARDS, NamedReward, answers_of
from gymdata.rewards.port import TaskRow


@REWARDS.register("contains")
class Contains(NamedReward):
    """The last message contains the text, or one of the answers, upper and lower case aside."""

    needs = "`--reward contains:TEXT` or the task column `answer`"
    column = "answer"
    argument = "TEXT"
    quick = True

    def check(self, text: str, task: TaskRow) -> float | None:
        answers = answers_of(task) if self.given is None else [self.given]
        return None if answers is None else float(any(answer.casefold() in text.casefold() for answer in answers))
