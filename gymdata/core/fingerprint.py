"""Fingerprints of tokenizers and chat templates, so that two files can be asked whether their ids mean the same.

What always holds: a tokenizer's hash depends on what its ids mean (pieces, merges, added tokens) and never on
file bytes, key order or the machine; equal hashes therefore say that one tokenizer's ids may be trained with the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence


def tokenizer_hash(pieces: Mapping[int, str], merges: Iterable[str | Sequence[str]], added: Mapping[int, str]) -> str:
    """BLAKE2b-128 hex of a tokenizer's meaning.

    ``pieces``: id → piece of the vocabulary. ``merges``: BPE merges in order, as ``"a b"`` or ``("a", "b")``; empty for
    a tokenizer without merges. ``added``: id → content of the added (special) tokens.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, rows in (
        ("pieces", sorted(pieces.items())),
        ("merges", [_merge(m) for m in merges]),
        ("added", sorted(added.items())),
    ):
        digest.update(f"{name}\n".encode())
        for row in rows:
            digest.update(json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode())
            digest.update(b"\n")
    return digest.hexdigest()


def template_hash(text: str | None) -> str:
    """BLAKE2b-128 hex of a chat template's text; of the empty text when there is none."""
    return hashlib.blake2b((text or "").encode(), digest_size=16).hexdigest()


def _merge(merge: str | Sequence[str]) -> list[str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return [left, right]
