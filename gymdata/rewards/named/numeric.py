"""The reward ``numeric``."""

from __future__ import annotations

import functools
import math
import re

from gymdata.rewards.named import REWARDS, NamedReward, answers_of
from gymdata.rewards.port import TaskRow

#: Between thousands: a comma, also in braces or with LaTeX's negative space, thin spaces, an apostrophe, an underscore.
_BETWEEN = r"(?:,(?:\\!)?|\{,\}|\{?\\[,;:! ]\}?|[\u00a0\u2007\u2009\u202f'’_])"
#: Thousands with spaces or points between them, which no list of numbers has: ``50 000``, ``1.234,56``, ``1.234.567``.
_SPACED = r"[1-9]\d{0,2}(?P<gap>[ \u00a0\u2007\u2009\u202f'’])\d{3}(?:(?P=gap)\d{3})*"
_POINTED = r"[1-9]\d{0,2}(?:(?:\.\d{3}){2,}|\.\d{3}(?=,\d))"
#: A sign, which may stand before a currency, digits with what may separate thousands, decimals, exponent. ``other``: a date,
#: a version or an address.
_NUMBER = re.compile(
    r"(?P<sign>[-+](?P<currency>\\?[$£€¥])?)?"
    rf"(?:(?<![\d.,])(?:(?P<spaced>{_SPACED})(?P<decimals>[.,]\d+)?|(?P<pointed>{_POINTED})(?P<fraction>,\d+)?)(?![.,]?\d)"
    rf"|(?P<other>\d+(?:\.\d+){{2,}})"
    rf"|(?:(?P<digits>\d+(?:{_BETWEEN}\d+)*)(?P<rest>\.?\d*)|(?P<part>\.\d+))(?P<exponent>[eE][-+]?\d+)?)"
)
_GROUPED = re.compile(rf"[1-9]\d{{0,2}}(?P<between>{_BETWEEN})\d{{3}}(?:(?P=between)\d{{3}})*")
_SEPARATOR = re.compile(_BETWEEN)
#: Hyphens, minus and dashes that models write for a minus sign.
_MINUS = str.maketrans(dict.fromkeys("−–‒‐‑﹣－", "-"))


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
    """The last number in a text, or None: 1,234.5, 50 000, 1.234,56, 9{,}500, −3e4 and -$5 are numbers, 1,2,3 are three."""
    if not text.isascii():
        text = text.translate(_MINUS)
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        last = last if match["other"] else match
    if last is None:
        return None
    sign, digits, rest = (last["sign"] or "")[:1], last["digits"] or "", last["rest"] or last["part"] or ""
    if whole := last["spaced"] or last["pointed"]:
        digits, rest = re.sub(r"\D", "", whole), (last["decimals"] or last["fraction"] or "").replace(",", ".")
    elif _GROUPED.fullmatch(digits):
        digits = _SEPARATOR.sub("", digits)
    elif len(listed := _SEPARATOR.split(digits)) == 2 and "{,}" in digits:  # decimals as LaTeX has them
        digits, rest = listed[0], f".{listed[1]}"
    elif len(listed) > 1:
        sign, digits = "", listed[-1]
    # In "12-5" the hyphen is between numbers: an operator or a range, not a sign; so it is in LaTeX's "12$-$5".
    before = text[: last.start()]
    before = before.removesuffix("$") if last["currency"] else before
    if before[-1:].isalnum():
        sign = ""
    return float(f"{sign}{digits}{rest}{last['exponent'] or ''}")


#: Cached, because the members of a group share the answer.
_answer_number = functools.lru_cache(maxsize=1024)(last_number)
