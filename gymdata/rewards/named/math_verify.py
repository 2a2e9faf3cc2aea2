"""The reward ``math_verify``."""

from __future__ import annotations

from typing import Any

from gymdata.errors import needs
from gymdata.rewards.named import REWARDS, NamedReward, answers_of
from gymdata.rewards.port import TaskRow


@REWARDS.register("math_verify")
class MathVerify(NamedReward):
    """The last message and the answer are mathematically equal."""

    needs = "the task column `answer`"
    column = "answer"

    def __init__(self, name: str, argument: str | None) -> None:
        super().__init__(name, argument)
        with needs("rewards"):
            import math_verify

        self._library: Any = math_verify

    def check(self, text: str, task: TaskRow) -> float | None:
        answers, library = answers_of(task), self._library
        if answers is None:
            return None
        # Its own timeouts use signals, which only the main thread may; the caller bounds the whole batch.
        prediction = library.parse(text, parsing_timeout=None)
        gold = [library.parse(a if "$" in a or "\\" in a else f"${a}$", parsing_timeout=None) for a in answers]
        return float(any(library.verify(g, prediction, timeout_seconds=None) for g in gold))
