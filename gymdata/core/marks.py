"""The marks that chat templates put between messages, in decoded text.

What always holds: only the outside of messages is read here; a mark that is not known is no border, so in doubt a text is
taken as plain.
"""

from __future__ import annotations

import re

_ROLES = (
    r"system|developer|user|human|assistant|model|chatbot|bot|tool|tool_response|tool_result|function|ipython|observation"
    r"|environment"
)
#: A mark that opens a message, with its role in one of the groups. Tokenizers that mark leading spaces put one after it.
OPENING = re.compile(
    rf"<[|｜][^<>\s]*?[|｜]>(?:<[|｜]| )?(?P<after>{_ROLES})\b"
    rf"|<(?:start_of_turn|[|]turn)> ?(?P<turn>{_ROLES})\b"
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
_CLOSES = re.compile(r"<?/|\[/|[◁◀]/|<[|](?:end|END)_")


def opens_reasoning(text: str) -> bool:
    """Whether ``text`` ends with a mark that opens a reasoning block, white space aside."""
    last = None
    for match in REASONING.finditer(text):
        last = match
    return last is not None and not _CLOSES.match(last[0]) and not text[last.end() :].strip()


def closes_reasoning(text: str) -> bool:
    """Whether ``text`` begins with a mark that closes a reasoning block, white space aside."""
    match = REASONING.match(text.lstrip())
    return match is not None and _CLOSES.match(match[0]) is not None


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
