"""The words of messages: secrets hidden, control characters escaped, numbers with nouns, settings as flags or keywords.

Invariant: the user name, password, query values and fragment of a URL are never shown, for all that is printed or written
goes through ``redacted``.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import reduce
from pathlib import Path
from typing import Any

HIDDEN = "***"
_URL = re.compile(r"""\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s"'<>\\`|]+)""")
#: Punctuation that may follow a URL in a sentence.
_PUNCTUATION = re.compile(r"[.,:;!?)\]]*$")
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


def command_line(words: Iterable[object]) -> str:
    """A command to copy into a shell. A word with single quotes is in double ones where these change nothing."""
    texts = map(str, words)
    return " ".join(f'"{w}"' if "'" in w and not re.search(r'["$`\\!]', w) else shlex.quote(w) for w in texts)


def redacted(text: str) -> str:
    """``text`` as ``shown``, with the secrets of its URLs replaced by ``***``."""
    text = shown(text)
    return _URL.sub(_shown, text) if "://" in text else text


def redacted_all(value: Any) -> Any:
    """Settings or facts with every text in them ``redacted``; mappings and lists are copied."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted_all(key): redacted_all(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_all(item) for item in value]
    return value


def _shown(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    end = _PUNCTUATION.search(rest)
    tail = end[0] if end is not None else ""
    rest = rest[: len(rest) - len(tail)]
    rest, hash_, fragment = rest.partition("#")
    rest, mark, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    query = "&".join(map(_pair, query.split("&"))) if query else ""
    return f"{scheme}{authority}{slash}{path}{mark}{query}{hash_}{HIDDEN if fragment else ''}{tail}"


def _pair(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals:
        return HIDDEN if name else name
    return text if not value or PLACEHOLDER.fullmatch(value) else f"{name}={HIDDEN}"


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


def abridged(names: Iterable[object], most: int = MOST) -> str:
    """Names for a message: those that fit in ``most`` characters, and how many more there are."""
    every = [str(name) for name in names]
    n, length = 0, 0
    while n < len(every) and (length := length + len(every[n]) + 2) <= most + 2:
        n += 1
    shown = ", ".join(every[:n]) or "".join(every[:1])[:most] + "…" * bool(every)
    more = len(every) - max(n, 1)
    return f"{shown} and {more:,} more" if more > 0 else shown


#: What ``short`` keeps in one piece: a command in backticks, or a word.
_PIECES = re.compile(r"`[^`\n]*`\S*|\S+")
_GAP = "…"
#: A path from the root, and the characters of one that count.
_ABSOLUTE = re.compile(r"""(?<![^\s'"`(=\[])/[^\s'"`,:;()\[\]…]+""")
_PATH = 24
#: Between a message and its hint.
_ARROW = "\n  → "


def short(text: str, most: int) -> str:
    """``text`` in at most ``most`` characters: its beginning, its end and the paths between them (half of it, at most)."""
    if len(text) <= most:
        return text
    pieces = [_clipped(piece, most * (3 if piece[0] == "`" else 2) // 4) for piece in _PIECES.findall(text)]
    kept, room = set[int](), most // 2
    for n, piece in enumerate(pieces):
        if "/" in piece and (room := room - len(piece) - 3) >= 0:
            kept.add(n)
    # Every piece may have a gap after it; the nearer to an end, the sooner it is kept.
    for n in sorted(set(range(len(pieces))) - kept, key=lambda n: min(n, len(pieces) - 1 - n)):
        if len(_with_gaps(pieces, kept | {n})) > most:
            break
        kept.add(n)
    return _with_gaps(pieces, kept)[:most]


def without_paths(*texts: str) -> tuple[list[str], dict[str, str]]:
    """``texts`` with the first four long paths replaced by stand-ins of ``_PATH`` characters, and the paths of these."""
    paths = dict.fromkeys(path for text in texts for path in _ABSOLUTE.findall(text) if _PATH < len(path) <= 1_000)
    stand_ins = {path: f"/{n}".ljust(_PATH, "\0") for n, path in enumerate(list(paths)[:4])}
    # One may begin as another one does.
    longest = sorted(stand_ins, key=len, reverse=True)
    named = [reduce(lambda text, path: text.replace(path, stand_ins[path]), longest, text) for text in texts]
    return named, {stand_in: path for path, stand_in in stand_ins.items()}


def refusal(message: str, hint: str, most: int) -> str:
    """A message and its hint, if it has one, in at most ``most`` characters."""
    (message, hint), paths = without_paths(message, hint)
    if hint:
        # Each has half of the room, and what the other one leaves.
        most -= len(_ARROW)
        hint = short(hint, max(most // 2, most - len(message)))
    text = f"{short(message, most - len(hint))}{_ARROW if hint else ''}{hint}"
    for stand_in, path in paths.items():
        text = text.replace(stand_in, path)
    return text


def shortened(title: str, texts: Sequence[str], most: int) -> str:
    """``texts`` as a list under a title: those that fit in ``most`` characters, and how many more there are."""
    each = max(100, (most - len(title)) // len(texts) - len("\n- "))
    lines, rest = [title], [f"- {short(text, each)}" for text in texts]
    while rest and len("\n".join([*lines, rest[0], f"- and {len(rest):,} more"])) <= most:
        lines.append(rest.pop(0))
    return "\n".join([*lines, f"- and {len(rest):,} more"] if rest else lines)


def named_changes(changes: Iterable[tuple[str, str]]) -> str:
    """What differs, as (name, text); where that is long the shortest texts first, and the names of the others."""
    every, names = list(changes), list[str]()
    texts = [text for _, text in every]
    if len("; ".join(texts)) <= MOST * 4 // 3:
        return "; ".join(texts)
    texts = []
    for name, text in sorted(every, key=lambda change: len(change[1])):
        if texts and len("; ".join([*texts, text])) > MOST * 2 // 3:
            names.append(name)
        else:
            texts.append(text)
    return "; ".join(texts) + (f"; also {abridged(names, MOST // 2)}" if names else "")


def _clipped(piece: str, most: int) -> str:
    after = most - most // 2 - len(_GAP)
    return piece if len(piece) <= most else f"{piece[: most // 2]}{_GAP}{piece[len(piece) - after :]}"


def _with_gaps(pieces: Sequence[str], kept: Set[int]) -> str:
    words = list[str]()
    for n, piece in enumerate(pieces):
        if n in kept:
            words.append(piece)
        elif words[-1:] != [_GAP]:
            words.append(_GAP)
    return " ".join(words)


def choices(name: str, names: Sequence[str]) -> str:
    """Names for a message: all of them; where they are many, how many there are and those nearest to ``name``."""
    everything = ", ".join(names)
    if len(everything) <= MOST:
        return everything
    nearest = difflib.get_close_matches(name, names, n=5, cutoff=0.3) or names[:5]
    return f"{len(names):,}, such as {', '.join(nearest)}"


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
    candidates = [candidate for candidate in names if candidate != name]
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6 if len(name) > 3 else 0.7)
    # Two letters in the wrong order are a slip in a short name, too.
    match = match or [
        c for c in sorted(candidates) if sorted(c) == sorted(name) or (len(name) > 2 and c.startswith(name))
    ]
    return f"did you mean {match[0]!r}?" if match else None


def plural(value: int, noun: str, several: str | None = None) -> str:
    """``noun`` for 1, ``several`` (default: ``noun`` with an s) for any other number."""
    return noun if value == 1 else several or f"{noun}s"


def counted(value: int, noun: str, several: str | None = None) -> str:
    """A number with its noun, and a verb that agrees if given: ``3 rollouts``, ``1 rollout has``."""
    return f"{value:,} {plural(value, noun, several)}"


def json_kind(value: object) -> str:
    """The JSON type of a value, for messages: null, boolean, number, text, list or object. Others keep their class
    name."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "number"), (float, "number"), (str, "text"), (list, "list")):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else type(value).__name__


def json_value(value: object) -> str:
    """A value for messages: ``null``, ``true``, ``number 5``, ``text`` with its first 60 characters; of a list or an
    object only the type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    shown = isinstance(value, (str, int, float))
    return f"{json_kind(value)} {str(value)[:60]}" if shown else json_kind(value)


def squeezed(text: str) -> str:
    """Without white space, which servers strip and JSON writers add."""
    return "".join(text.split())


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
        text = repr(value)
    except BaseException:  # noqa: BLE001 - user code, or an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    begin, end = text[: most // 2], text[4 - most // 2 :]
    return text if len(text) <= most else f"{begin} … {end} ({len(text):,} characters)"


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

    def named(match: re.Match[str]) -> str:
        name, value = match.groups()
        return option(name, {"True": True, "False": False}.get(value, value))

    return _OPTION.sub(named, text)
