"""Error messages of tools, as the policy reads them.

Invariants: it is text that every file can hold, at most 64 KiB of it, and where it was cut it says so.
"""

from __future__ import annotations

import json
from typing import Any

MAX_OUTPUT_BYTES = 64 * 1024


def as_text(value: Any) -> str:
    """A tool's answer as the policy reads it; what is no text becomes JSON."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, TypeError):  # circular, or keys that are no strings
            value = str(value)
    data: bytes = value.encode("utf-8", "replace")
    if len(data) <= MAX_OUTPUT_BYTES:
        return data.decode()
    head = data[:MAX_OUTPUT_BYTES].decode("utf-8", "ignore")
    return f"{head}\n[output cut: {len(data):,} bytes, the first {MAX_OUTPUT_BYTES:,} are shown]"


def clean(text: str) -> str:
    """Without lone surrogates, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


def tool_error_message(error: str) -> str:
    """What the policy did wrong."""
    return json.dumps({"error": clean(error)[:2000]}, ensure_ascii=False)
