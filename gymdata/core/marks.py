"""The marks that chat templates put between messages, in decoded text.

What always holds: only the outside of messages is read here; a mark that is not known is no border, so in doubt a text is
taken as plain.
"""

from __future__ import annotations

import json
import re
from typing import Any

_ROLES = (
    r"system|developer|user|human|assistant|model|chatbot|bot|tool|tool_response|tool_result|function|ipython|observation"
    r"|environment"
)
#: A mark that opens a message, with its role in one of the groups.
OPENING = re.compile(
    rf"<[|｜][^<>\s]*?[|｜]>(?:<[|｜])?(?P<after>{_ROLES})\b"
    rf"|<(?:start_of_turn|[|]turn)>(?P<turn>{_ROLES})\b"
    rf"|<[|｜]?(?P<inside>{_ROLES})(?:_TOKEN)?[|｜]?>"
    rf"|\[(?P<bracket>SYSTEM_PROMPT|INST|TOOL_RESULTS|AVAILABLE_TOOLS)\]",
    re.IGNORECASE,
)
_BRACKETS = {"system_prompt": "system", "inst": "user", "tool_results": "tool", "available_tools": "system"}
_OF_ASSISTANT = frozenset({"assistant", "model", "chatbot", "bot"})
_OF_SYSTEM = frozenset({"system", "developer"})
#: Special tokens that stand inside a message, not between two.
_INNER = re.compile(
    r"think|reason|call|tool_?sep|output|function=|channel|message|constrain|python|image|video|audio|vision|pad|fim|box"
    r"|quad|object|ref|unk|mask",
    re.IGNORECASE,
)
REASONING = re.compile(
    r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|[◁◀]/?think[▷▶]"
    r"|<[|]channel[|]?>\s*(?:analysis|thought)|<[|](?:begin|end)_of_thought[|]>|<[|](?:START|END)_THINKING[|]>",
    re.IGNORECASE,
)


def is_border(token: str) -> bool:
    """Whether a special token, decoded, stands between messages."""
    return bool(OPENING.fullmatch(token)) or not _INNER.search(token)


def roles(text: str) -> list[str]:
    """The roles of the messages that ``text`` opens, in order; ``system`` for developers, ``assistant`` for models."""
    found = []
    for match in OPENING.finditer(text):
        name = next(value for value in match.groups() if value).lower()
        name = _BRACKETS.get(name, name)
        found.append("assistant" if name in _OF_ASSISTANT else "system" if name in _OF_SYSTEM else name)
    return found


def opens_message(text: str) -> bool:
    """Whether ``text`` begins with a mark that opens a message."""
    return OPENING.match(text.lstrip()) is not None


def same_turn(one: str, other: str) -> bool:
    """Whether two renderings of an assistant turn are equal after parsing JSON and collapsing white space."""
    return one == other or normal(one) == normal(other)


def normal(text: str) -> str:
    """``text`` with JSON objects and lists in one spelling, and white space collapsed."""
    parts, at = [], 0
    decoder = json.JSONDecoder()
    for match in re.finditer(r"[{\[]", text):
        start = match.start()
        if start < at:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        parts += [_collapsed(text[at:start]), json.dumps(_plain(value), sort_keys=True)]
        at = end
    return "\0".join([*parts, _collapsed(text[at:])])


def _collapsed(text: str) -> str:
    """Whether a mark or an object stands on a line of its own says nothing, so white space beside it is left out."""
    return re.sub(r" ?(<[^<> ]+>) ?", r"\1", re.sub(r"\s+", " ", text)).strip()


def _plain(value: Any) -> Any:
    """A JSON value in which 1.0 is 1, and arguments given as JSON text are what they spell."""
    if isinstance(value, dict):
        return {k: _arguments(v) if k in ("arguments", "parameters") else _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return _plain(parsed) if isinstance(parsed, dict) else value
    return _plain(value)
