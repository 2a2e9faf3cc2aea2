"""What people and files are shown of a URL: no user name, no password, no value of its query string, no fragment.

Invariants: only URLs are touched; redacting twice changes nothing. Errors, run.json, settings of child processes and
messages all go through here, so that a key in a URL is nowhere but in the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_URL = re.compile(r"""\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s"'<>\\`|]+)""")
#: What follows a URL in a sentence.
_PUNCTUATION = re.compile(r"[.,:;!?)\]]*$")
#: Stands for a value that a child process finds in its environment.
PLACEHOLDER = re.compile(r"\$\{(GYMDATA_SECRET_\d+)\}")


def redacted(text: str) -> str:
    """``text`` with the secrets of its URLs replaced by ``***``."""
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


def _shown(found: re.Match[str]) -> str:
    scheme, rest = found[1], found[2]
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
