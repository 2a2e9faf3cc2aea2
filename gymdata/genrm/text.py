"""The text of a response for a judge, and the sizes by which length and style are weighted.

Responses come in the Responses API's shape: ``{"output": [{"type": "reasoning" | "message" | …}]}``.
"""

from __future__ import annotations

import re
from typing import Any

#: Shown in place of an answer without text.
EMPTY = "None"

_CODE = re.compile(r"```.*?```", re.DOTALL)
_STYLE = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^#{1,6}\s",
        r"^[^\S\n]*\d+\.\s",
        r"^[^\S\n]*[-*+]\s",
        r"\*\*[^*\n]+\*\*",
        r"__[^_\n]+__",
        "[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf]",
    )
)


def plain_text(content: Any) -> str:
    """The text of a message's content: a string as it is, the ``text`` of a list of parts joined, else nothing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, (str, dict))]
    return "".join(text for text in texts if isinstance(text, str))


def answer_text(response: Any) -> str:
    """The text of a response's ``message`` items; reasoning is not part of it."""
    return "".join(plain_text(item.get("content")) for item in _items(response, "message"))


def reasoning_text(response: Any) -> str:
    """The summaries of a response's ``reasoning`` items."""
    return "".join(plain_text(item.get("summary")) for item in _items(response, "reasoning"))


def response_texts(response: Any) -> tuple[str, str]:
    """(reasoning, answer)."""
    return reasoning_text(response), answer_text(response)


def shown(text: str) -> str:
    """An answer as the judge sees it: unchanged, or the word ``None`` when it is blank."""
    return text if text.strip() else EMPTY


def style_density(text: str) -> float:
    """Headers, list items, bold spans and emoji for each character, code blocks apart; 0 for a blank text."""
    prose = _CODE.sub("", text)
    size = len(prose.strip())
    return sum(len(pattern.findall(prose)) for pattern in _STYLE) / size if size else 0.0


def _items(response: Any, kind: str) -> list[dict[str, Any]]:
    output = response.get("output") if isinstance(response, dict) else None
    return [i for i in output if isinstance(i, dict) and i.get("type") == kind] if isinstance(output, list) else []
