"""How pages write numbers, ids and text from data."""

from __future__ import annotations

import math
from typing import Any

from gymdata.errors import printable

#: What a page, or a part of it, is rendered from.
Values = dict[str, Any]


def number(value: Any) -> str:
    """A number to four digits; a dash for None."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}" if isinstance(value, float) else visible(value)


def short(value: Any, length: int = 12) -> str:
    text = visible(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def ending(value: Any, length: int) -> str:
    """The end of a path, its most telling part."""
    text = visible(value)
    return text if len(text) <= length else "…" + text[1 - length :]


def signed(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:+.3f}"


def share(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage."""
    return "–" if value is None or value != value else f"{100 * value:.{digits}f} %"


def visible(value: Any) -> str:
    """Text with control characters for terminals and browsers as escapes."""
    return "" if value is None else printable(str(value))


def seconds(value: float | None) -> str:
    if not value or math.isnan(value):
        # Imported rollouts have no durations.
        return "–"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 90 else f"{int(value // 60)} min {int(value % 60)} s"
