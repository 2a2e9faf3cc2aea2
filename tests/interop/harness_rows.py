"""A row of each format of other harnesses, with the answer n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

QUESTION = {"role": "user", "content": "How much is 2+3?"}
ANSWER = {"role": "assistant", "content": "5"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}


def verifiers(n: int) -> dict[str, Any]:
    called = {
        "role": "assistant", "content": "", "reasoning_content": "Add.",
        "tool_calls": ['{"id": "c1", "name": "add", "arguments": "{\\"a\\": 2}"}'],
    }  # fmt: skip
    return {
        "example_id": 7, "prompt": [QUESTION], "completion": [called, RESULT, ANSWER | {"content": str(n)}],
        "answer": "5", "info": {"level": 1}, "reward": 0.75, "error": None,
        "timing": {"total_ms": 3.0}, "is_completed": True, "is_truncated": False, "stop_condition": "no_tools_called",
        "metrics": {"exact": 0.5, "num_turns": 2.0}, "exact": 0.5, "num_turns": 2.0,
        "tool_defs": [{"name": "add", "description": "Adds.", "parameters": {}}],
    }  # fmt: skip


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {"verifiers": verifiers}
