"""The words, and the numbers in a text, by which other projects write true and false."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_YES = "true t yes y desirable chosen good positive correct right accepted accept preferred like pass"
_NO = "false f no n undesirable rejected bad negative incorrect wrong refused reject dispreferred dislike fail"
_WORDS = dict.fromkeys(_YES.split(), True) | dict.fromkeys(_NO.split(), False)


def truth(value: Any) -> bool | None:
    """A boolean, 1 or 0, or a text that says one of them; None for anything else."""
    if isinstance(value, str):
        word = value.strip().casefold()
        value = _WORDS.get(word, float(word) if NUMBER.fullmatch(word) else None)
    return bool(value) if is_number(value) and value in (0, 1) else None


def is_number(value: Any) -> bool:
    """Whether a cell is a number or a boolean."""
    return type(value) in (bool, int, float)
