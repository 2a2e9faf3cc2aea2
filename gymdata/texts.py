"""The words of messages: secrets hidden, control characters escaped, numbers with nouns, settings as flags or keywords.

Invariant: the user name, password, query values and fragment of a URL are never shown, for all that is printed or written
goes through ``redacted``.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
#: A URL, up to the next one of a list and without the punctuation that follows it in a sentence.
_URL = re.compile(r"""\b[A-Za-z][A-Za-z0-9+.-]*://(?:(?!,https?://|[.,:;!?)\]]*(?:[\s"'<>\\`|]|$))[^\s"'<>\\`|])+""")
#: Replaces a secret, whose value a child process finds in its environment.
PLACEHOLDER = re.compile(r"\$\{(GYMDATA_SECRET_\d+)\}")
_ONE_SLASH = re.compile(r"(?<![\w./+-])(s3|gs|az|hf|https?):/(?=[^/\s])")
#: Local folder → what people are shown in its place (see ``show_as``).
_shown_as: dict[str, str] = {}


def show_as(folder: str, url: str) -> None:
    """From now on show people what is below the local ``folder`` as what is below ``url``, a copy of which it is."""
    _shown_as[f"{folder}/"] = f"{url}/"


def shown(text: str) -> str:
    """``text`` with the folders of ``show_as`` replaced by their URLs, and the slash that a path has lost of one."""
    for folder, url in _shown_as.items():
        text = text.replace(folder, url)
    return _ONE_SLASH.sub(r"\1://", text) if ":/" in text else text


def redacted(text: str) -> str:
    """``text`` as ``shown``, with the secrets of its URLs replaced by ``***``."""
    text = shown(text)
    return _URL.sub(_without_secrets, text) if "://" in text else text


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Settings or facts with every text in them, keys too, changed; mappings and lists are copied."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {each_text(key, change): each_text(item, change) for key, item in value.items()}
    return [each_text(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def redacted_all(value: Any) -> Any:
    """Settings or facts with every text in them ``redacted``."""
    return each_text(value, redacted)


def _without_secrets(url: re.Match[str]) -> str:
    rest, hash_, fragment = url[0].partition("#")
    rest, mark, query = rest.partition("?")
    rest = re.sub(r"://[^/]*@", f"://{HIDDEN}@", rest)
    pairs = [
        before + (value if not value or PLACEHOLDER.fullmatch(value) else HIDDEN)
        for before, value in query_values(query)
    ]
    return f"{rest}{mark}{'&'.join(pairs)}{hash_}{HIDDEN if fragment else ''}"


def query_values(query: str) -> list[tuple[str, str]]:
    """The values of a URL's query, each with what is in front of it: ``name=``, or nothing."""
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [(name + equals, value) if equals else ("", name) for name, equals, value in pairs]


#: What a terminal interprets: control characters, bidirectional marks and overrides, separators, invisible tags, and
#: lone surrogates, which cannot be written. Joiners stay, for scripts and emoji need them.
ACTS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff"
    "\\ufff9-\\ufffb\\ud800-\\udfff\\U000e0000-\\U000e007f]"
)


def printable(text: str, *, lines: bool = True) -> str:
    """``text`` for a terminal: what it would interpret is written as an escape (``\\x1b``, ``\\u202e``), so that data
    cannot colour, overwrite or reorder what people read. ``lines``: line feeds and tabs stay; without it they are
    escaped, too."""
    text = ACTS.sub(lambda match: match[0].encode("unicode_escape").decode(), shown(text))
    return text if lines else text.replace("\n", "\\n").replace("\t", "\\t")


#: Characters of a refusal with its hint, and of a list of names in one.
REFUSAL = 300
MOST = 100
#: A long path from the root, or a URL, of which people need every part.
_PATH = re.compile(
    r"""(?<![^\s'"`(=\[])/[^\s'"`,:;()\[\]…]{24,1000}(?=[\s'"`,:;()\[\]…]|$)|\b[a-z]\w*://[^\s'"`<>|\\…]{12,1000}(?=[\s'"`<>|…]|$)"""
)


def abridged(names: Iterable[object], most: int = MOST) -> str:
    """Names for a message: those that fit in ``most`` characters, and how many more there are."""
    every = [str(name) for name in names]
    n, length = 0, 0
    while n < len(every) and (length := length + len(every[n]) + 2) <= most + 2:
        n += 1
    shown = ", ".join(every[:n]) or "".join(every[:1])[:most] + "…" * bool(every)
    more = len(every) - max(n, 1)
    return f"{shown} and {more:,} more" if more > 0 else shown


def short(text: str, most: int) -> str:
    """``text`` in at most ``most`` characters: its beginning and its end."""
    begin = most // 2
    return text if len(text) <= most else f"{text[: begin - 2]} … {text[len(text) - (most - begin - 1) :]}"


def refusal(message: str, hint: str, most: int) -> str:
    """A message and its hint, if it has one, in at most ``most`` characters. The first four long paths in them stay whole,
    and count as one character each."""
    paths = sorted(list(dict.fromkeys(_PATH.findall(f"{message} {hint}")))[:4], key=len, reverse=True)
    stand_ins = {chr(0xE000 + n): path for n, path in enumerate(paths)}
    for stand_in, path in stand_ins.items():
        message, hint = message.replace(path, stand_in), hint.replace(path, stand_in)
    # Each has half of the room, and what the other one leaves.
    hint = f"\n  → {short(hint, max(most // 2 - 5, most - 5 - len(message)))}" if hint else ""
    text = short(message, most - len(hint)) + hint
    for stand_in, path in stand_ins.items():
        text = text.replace(stand_in, path)
    return text


def choices(name: str, names: Sequence[str]) -> str:
    """Names for a message: all of them; where they are many, how many there are and those nearest to ``name``."""
    everything = ", ".join(names)
    if len(everything) <= MOST:
        return everything
    nearest = difflib.get_close_matches(name, names, n=5, cutoff=0.3) or names[:5]
    return f"{len(names):,}, such as {', '.join(name for name in names if name in nearest)}"


def nearest_beside(path: Path, *, folders: bool = False) -> str | None:
    """The nearest name to a path that is not there, or to its first folder that is not. ``folders``: only of folders."""
    with contextlib.suppress(OSError):
        while not path.parent.exists():
            path, folders = path.parent, True
        return nearest(path.name, (p.name for p in path.parent.iterdir() if not folders or p.is_dir()))
    return None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The question whether one of ``names`` is meant, where one is near to ``name``."""
    # The path itself is not a suggestion.
    others = sorted(set(names) - {name})
    match = difflib.get_close_matches(name, others, n=1, cutoff=0.6 if len(name) > 3 else 0.7)
    # Two letters in the wrong order are a slip in a short name, too, and its beginning is it.
    match = match or [o for o in others if sorted(o) == sorted(name) or (len(name) > 2 and o.startswith(name))]
    return f"did you mean {match[0]!r}?" if match else None


def plural(value: int, noun: str, several: str | None = None) -> str:
    """``noun`` for 1, ``several`` (default: ``noun`` with an s) for any other number."""
    return noun if value == 1 else several or f"{noun}s"


def counted(value: int, noun: str, several: str | None = None) -> str:
    """A number with its noun, and a verb that agrees if given: ``3 rollouts``, ``1 rollout has``."""
    return f"{value:,} {plural(value, noun, several)}"


_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "text",
    list: "list",
    Mapping: "object",
}


def json_kind(value: object) -> str:
    """The JSON type of a value, for messages: null, boolean, number, text, list or object. Others keep their class
    name."""
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), type(value).__name__)


def json_value(value: object) -> str:
    """A value for messages: ``null``, ``true``, ``number 5``, ``text`` with its first 60 characters; of a list or an
    object only the type."""
    if isinstance(value, bool):
        return str(value).lower()
    return json_kind(value) + (f" {str(value)[:60]}" if isinstance(value, (str, int, float)) else "")


def first_line(error: BaseException) -> str:
    """What an error of a library says, without what follows; its type where it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip()[:300] or type(error).__name__


def raised(error: BaseException) -> str:
    """``ValueError: message``, whatever the message's own code does."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as fault:  # noqa: BLE001 - user code
        return f"{type(error).__name__}, whose message raised {type(fault).__name__}"


def brief(value: object, most: int = 80) -> str:
    """At most ``most`` characters of a value, for messages: its beginning and its end, where a path has its name."""
    try:
        text = redacted(repr(value))
    except BaseException:  # noqa: BLE001 - user code, or an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{short(text, most)} ({len(text):,} characters)"


#: Set by the command line for itself and the processes that it starts: there, messages name flags.
COMMAND_LINE = "GYMDATA_COMMAND_LINE"
#: The flag of a setting that has another name, and what is written in Python for one that is no keyword.
_FLAGS = {"source": "--from"}
_IN_PYTHON = {"allow_changed": "`with gymdata.reading(allow_changed=True):`", "fix": "`gymdata.fix`"}
_OPTION = re.compile(r"\{([a-z_.]+)(?::([^{}]*))?\}")


def option(name: str, value: object = None) -> str:
    """A setting in a message, as the caller gives it: ``--min-margin`` on the command line, ``min_margin=`` in Python.
    ``value``: with it, as ``--overwrite`` and ``overwrite=True``. ``name`` may be the dotted key of a section."""
    section, dot, key = name.rpartition(".")
    if os.environ.get(COMMAND_LINE):
        shown = "" if value is None or isinstance(value, bool) else str(value)
        if dot:
            return f"--set {name}={shown}"
        word = _FLAGS.get(name) or f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        return f"{word} {shown}".rstrip()
    if name in _IN_PYTHON:
        return _IN_PYTHON[name]
    shown = "" if value is None else str(value) if isinstance(value, str) and " " in value else repr(value)
    return f"{section}={{{key!r}: {shown or '…'}}}" if dot else f"{name}={shown}"


def with_options(text: str) -> str:
    """``text``, in which ``{min_margin}`` and ``{overwrite:True}`` are settings, as ``option`` writes them. For texts that
    are written once, and shown on the command line and in Python."""
    values = {"True": True, "False": False}
    return _OPTION.sub(lambda match: option(match[1], values.get(match[2], match[2])), text)
