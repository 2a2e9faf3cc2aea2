"""Chat messages and tasks as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from gymdata.errors import UsageError

#: A chat message as a plain dict: role, content, and optionally reasoning, tool_calls, tool_call_id, name.
#: ``tool_calls`` is a list of ``{"id": str, "type": "function", "function": {"name": str, "arguments": dict}}``.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the task file. ``row`` is the whole source row, kept for rewards and environments."""

    task_id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    row: dict[str, Any]
    content_hash: str


def split_tasks(task_ids: Sequence[str], share: float, seed: int = 0) -> set[str]:
    """The tasks of the held-out side: ``share`` of the distinct ones, at least one and never all, drawn by seeded hash.

    Raises UsageError when there are fewer than two tasks or the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise UsageError.bad_value("split", share, "a share between 0 and 1, such as 0.1")
    distinct = set(task_ids)
    if len(distinct) < 2:
        raise UsageError(f"split: got {len(distinct)} task(s), expected at least 2 to put on two sides")
    drawn = sorted(distinct, key=lambda t: (xxhash.xxh3_64_intdigest(t.encode(), seed), t))
    return set(drawn[: min(max(1, round(share * len(drawn))), len(drawn) - 1)])
