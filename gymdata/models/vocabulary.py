"""Token ids as text, for people: the pieces of a tokenizer.json, without loading a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gymdata.store.paths import RunFacts

_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Id → bytes. ``special``: ids that are no text of a message, such as the ends of turns."""

    pieces: Mapping[int, bytes]
    special: frozenset[int] = field(default_factory=frozenset)

    def text(self, token: int) -> str:
        """One token for display: bytes that are no whole character are written as ``\\xNN``."""
        piece = self.pieces.get(token)
        return f"⟨{token}⟩" if piece is None else piece.decode("utf-8", "backslashreplace")

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens together, special ones written out."""
        return b"".join(self.pieces.get(i, f"⟨{i}⟩".encode()) for i in ids).decode("utf-8", "replace")


def find_tokenizer(facts: RunFacts) -> Path | None:
    """The tokenizer.json of the model that a run.json names, when that is a folder here."""
    identity, config, model, engine = (facts.get(key) or {} for key in ("identity", "config", "model", "engine"))
    named = [
        config.get("tokenizer"),
        identity.get("tokenizer"),
        identity.get("model"),
        config.get("model"),
        model.get("policy"),
        facts.get("policy"),
        engine.get("served_from"),
    ]
    for folder in named:
        if isinstance(folder, str) and folder and (file := Path(folder, _FILE)).is_file():
            return file
    return None


def load_vocabulary(path: str | Path) -> Vocabulary | None:
    """The vocabulary of a tokenizer.json, or of the folder that holds it; None when it cannot be read."""
    file = Path(path, _FILE) if Path(path).is_dir() else Path(path)
    try:
        stat = file.stat()
    except OSError:
        return None
    return _load(file, stat.st_mtime_ns, stat.st_size)


@cache
def _load(file: Path, _changed: int, _size: int) -> Vocabulary | None:
    try:
        content = json.loads(file.read_bytes())
        named = content["model"]["vocab"]
        ids = named.items() if isinstance(named, dict) else ((piece, i) for i, (piece, *_) in enumerate(named))
        kinds = set(_kinds([content.get("decoder"), content.get("pre_tokenizer")]))
        pieces = {int(i): _bytes_of(piece, byte_level="ByteLevel" in kinds) for piece, i in ids}
        added = content.get("added_tokens") or []
        pieces |= {int(token["id"]): str(token["content"]).encode() for token in added}
        return Vocabulary(pieces, frozenset(int(token["id"]) for token in added if token.get("special")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _kinds(parts: Iterable[Any]) -> Iterable[str]:
    """The types of decoders and pre-tokenizers, also of those inside a sequence."""
    for part in parts:
        if isinstance(part, dict):
            yield str(part.get("type"))
            yield from _kinds([*(part.get("decoders") or []), *(part.get("pretokenizers") or [])])


@cache
def _byte_of() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _bytes_of(piece: str, *, byte_level: bool) -> bytes:
    """Of byte-level BPE; else of SentencePiece or WordPiece: a mark for the space, or one byte as ``<0x0A>``."""
    if byte_level:
        table = _byte_of()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
