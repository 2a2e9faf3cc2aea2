"""The reward ``numeric``."""

from __future__ import annotations

import functools
import math
import re

from gymdata.rewards.named import REWARDS, NamedReward, answers_of
from gymdata.rewards.port import TaskRow

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
#: Hyphen, minus and dashes that models write for a minus sign.
_MINUS = str.maketrans({"−": "-", "–": "-", "‒": "-"})


@REWARDS.register("numeric")
class Numeric(NamedReward):
    """The last number in the last message equals the answer within 1e-6 relative."""

    needs = "the task column `answer`, with a number in it"
    column = "answer"
    quick = True

    def check(self, text: str, task: TaskRow) -> float | None:
        answers = [n for n in map(_answer_number, answers_of(task) or ()) if n is not None]
        if not answers:
            return None
        number = last_number(text)
        return float(number is not None and any(math.isclose(number, a, rel_tol=1e-6, abs_tol=1e-9) for a in answers))


def last_number(text: str) -> float | None:
    """The last number in a text, or None: 1,234.5 and −3e4 are numbers."""
    if not text.isascii():
        text = text.translate(_MINUS)
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    digits = last.group().replace(",", "")
    # In "12-5" the hyphen is between numbers: an operator or a range, not a sign.
    if digits[0] in "+-" and last.start() > 0 and text[last.start() - 1].isalnum():
        digits = digits[1:]
    return float(digits)


#: Cached, because the members of a group share the answer.
_answer_number = functools.lru_cache(maxsize=1024)(last_number)
