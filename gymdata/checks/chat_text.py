"""The marks that chat templates put between messages, in decoded text.

Invariants: only the outside of messages is read here; a mark that is not known is no border, so in doubt a text is
taken as plain.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

#: Prefixes that some formats put before the names of their elements.
_NS = r"(?:[\w-]{1,20}:|[|｜]\w{1,20}[|｜])?"
#: Where something that can be read may begin: JSON, an XML call in three spellings, a Python call.
_START = re.compile(
    r"(?P<json>[{\[])"
    rf"|<(?:{_NS})(?:function|invoke|tool_call)(?:=|\s+name=)[\"']?(?P<xml>[\w.-]+)[\"']?\s*>"
    r"|<tool_call>\s*(?P<keyed>[\w.-]+)\s*(?=<arg_key>|</tool_call>)"
    r"|(?<![\w.])(?P<python>[A-Za-z_][\w.]*)\("
)
_END = re.compile(rf"\s*</(?:{_NS})(?:function|invoke|tool_call)>")
_PARAMETER = re.compile(
    rf"\s*<(?:{_NS})(?:parameter|param)(?:=|\s+name=)[\"']?(?P<name>[^\"'<>=]+?)[\"']?"
    rf"(?:\s+string=[\"'](?P<text>true|false)[\"'])?\s*>(?P<value>.*?)</(?:{_NS})(?:parameter|param)>",
    re.DOTALL,
)
_KEYED = re.compile(r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)
_STRING_OR_BRACKET = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[()\[\]{}]""", re.DOTALL)
#: Most characters of a Python call, and most false beginnings that are tried: text can be hostile.
_LONGEST_CALL = 20_000
_MOST_TRIED = {"json": 10_000, "xml": 200, "keyed": 200, "python": 200}
_CONSTANTS = {"true": True, "false": False, "null": None}


def same_turn(text: str, other: str) -> bool:
    """Whether two renderings of an assistant turn are equal after reading calls and collapsing white space."""
    return text == other or normal(text) == normal(other)


def normal(text: str) -> str:
    """``text`` with JSON values and tool calls normalised, and white space collapsed."""
    parts, position = [], 0
    left = dict(_MOST_TRIED)
    for match in _START.finditer(text):
        kind = str(match.lastgroup)
        if match.start() < position or not left[kind]:
            continue
        call = _READ[kind](text, match)
        if call is None:
            left[kind] -= 1
            continue
        value, end = call
        parts += [_collapsed(text[position : match.start()]), json.dumps(value, sort_keys=True)]
        position = end
    return "\0".join([*parts, _collapsed(text[position:])])


def _json_value(text: str, match: re.Match[str]) -> tuple[Any, int] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, match.start())
    except (ValueError, RecursionError):
        return None
    return _plain(value), end


def _xml_call(text: str, match: re.Match[str]) -> tuple[Any, int] | None:
    """``<function=f><parameter=a>1</parameter></function>`` and its kin."""
    position, pattern = match.end(), _PARAMETER if match["xml"] is not None else _KEYED
    arguments: dict[str, object] = {}
    while (argument := pattern.match(text, position)) is not None:
        # JSON or a Python constant where it is one, else its text.
        text_value = argument["value"].strip()
        value: Any = {"True": True, "False": False, "None": None}.get(text_value, _collapsed(text_value))
        if pattern is _PARAMETER and argument["text"] == "true":
            value = text_value
        else:
            with contextlib.suppress(ValueError, RecursionError):
                value = _plain(json.loads(text_value))
        arguments[argument["name"].strip()] = value
        position = argument.end()
    end = _END.match(text, position)
    name = match["xml"] or match["keyed"]
    return ({"name": name, "arguments": arguments}, end.end()) if end is not None else None


def _python_call(text: str, match: re.Match[str]) -> tuple[Any, int] | None:
    """``f(a=1, b="x")``: keyword arguments that are constants, lists or dicts, and nothing else."""
    end = _closing(text, match.end())
    if end is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in the model's text is no reason for a warning
            parsed = ast.parse(f"f({text[match.end() : end]})", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args or any(k.arg is None for k in parsed.keywords):
            return None
        values = {str(k.arg): ast.literal_eval(_JsonNames().visit(k.value)) for k in parsed.keywords}
        arguments = _plain(json.loads(json.dumps(values)))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return {"name": match["python"], "arguments": arguments}, end + 1


class _JsonNames(ast.NodeTransformer):
    """The names of JSON's constants in a Python expression as what they mean."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


_READ: dict[str, Callable[[str, re.Match[str]], tuple[Any, int] | None]] = {
    "json": _json_value,
    "xml": _xml_call,
    "keyed": _xml_call,
    "python": _python_call,
}


def _closing(text: str, start: int) -> int | None:
    """Where the parenthesis that was opened before ``start`` closes, outside of strings."""
    depth = 1
    for part in _STRING_OR_BRACKET.finditer(text, start, start + _LONGEST_CALL):
        depth += (part[0] in ("(", "[", "{")) - (part[0] in (")", "]", "}"))
        if depth == 0:
            return part.start() if part[0] == ")" else None
    return None


def _collapsed(text: str) -> str:
    """White space beside a mark or an object has no meaning, and is removed."""
    return re.sub(r" ?(<[^<> ]+>) ?", r"\1", re.sub(r"\s+", " ", text)).strip()


def _plain(value: Any, key: str = "") -> Any:
    """A JSON value in which 1.0 is 1, and arguments given as JSON text are parsed. ``key``: that it has in an object."""
    if isinstance(value, str) and key in ("arguments", "parameters"):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(parsed := json.loads(value), dict):
                return _plain(parsed)
    if isinstance(value, dict):
        return {k: _plain(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
#: Special tokens inside a message, not between two.
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
#: The answer's channel, or the end of one, also closes a channel of reasoning.
_CHANNEL_CLOSES = r"<[|]channel[|]>\s*final|<channel[|]>"
_CLOSES = re.compile(rf"<?/|\[/|[◁◀]/|<[|](?:end|END)_|{_CHANNEL_CLOSES}")
_BORDERS = re.compile(f"({REASONING.pattern}|{_CHANNEL_CLOSES})", re.IGNORECASE)


def outside_reasoning(text: str) -> list[str] | None:
    """The parts of an answer outside of its reasoning, in order; None where reasoning is never closed. Text before a
    closing mark without an opening one is reasoning, which the prompt opened."""
    parts: list[str] = []
    position, opened = 0, False
    for mark in _BORDERS.finditer(text):
        if _CLOSES.match(mark[0]):
            parts = parts if opened else []
            position, opened = mark.end(), False
        elif not opened:
            parts.append(text[position : mark.start()])
            opened = True
    return None if opened else [*parts, text[position:]]


def between_marks(text: str, change: Callable[[str], str]) -> str:
    """``text`` with every part between marks of reasoning changed; the marks stay."""
    return "".join(part if n % 2 else change(part) for n, part in enumerate(_BORDERS.split(text)))


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
    """Whether a special token, decoded, is a border between messages."""
    return bool(OPENING.fullmatch(token)) or not _INNER.search(token)


def roles(text: str) -> list[str]:
    """The roles of the messages that ``text`` opens, in order; ``system`` for developers, ``assistant`` for models."""
    names = []
    for match in OPENING.finditer(text):
        name = next(value for value in match.groups() if value).lower()
        name = _BRACKETS.get(name, name)
        names.append("assistant" if name in _OF_ASSISTANT else "system" if name in _OF_SYSTEM else name)
    return names


def opens_message(text: str) -> bool:
    """Whether ``text`` begins with a mark that opens a message."""
    return OPENING.match(text.lstrip()) is not None
