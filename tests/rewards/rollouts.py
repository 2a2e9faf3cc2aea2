"""A rollout as a reward sees it."""

from __future__ import annotations

from typing import Any


def rollout(text: str, **task: Any) -> dict[str, Any]:
    """What a reward function sees of a one-message answer."""
    completion = [{"role": "assistant", "content": text}]
    prompt = [{"role": "user", "content": task.get("prompt", "q")}]
    return {
        "messages": [*prompt, *completion],
        "prompt": prompt,
        "completion": completion,
        "text": text,
        "completion_ids": [1, 2],
        "task": {"prompt": "q", **task},
        "tools": None,
        "status": "completed",
    }
