"""One rollout in each format."""

from __future__ import annotations

from typing import Any


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


NAT = [{"episode": _said(text), "reward": 1.0} for text in "ab"]


ATIF = [
    {"schema_version": "ATIF-v1.6", "steps": [{"source": "user", "message": "q"}, {"source": "agent", "message": text}]}
    for text in "ab"
]
