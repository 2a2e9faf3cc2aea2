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


def trl_completions(n: int) -> dict[str, Any]:
    return {
        "step": 3, "prompt": [QUESTION], "completion": [ANSWER | {"content": str(n)}], "exact": 0.5, "length": 2.0,
        "source": "sums", "advantage": -0.25,
    }  # fmt: skip


def verl_dump(n: int) -> dict[str, Any]:
    return {
        "input": "system\nBe brief.\nuser\nHow much is 2+3?\nassistant\n", "output": str(n), "gts": "5", "score": 1.0,
        "step": 4, "acc": True, "pred": "5",
    }  # fmt: skip


def skyrl_dump(n: int) -> dict[str, Any]:
    return {
        "input_prompt": "<|im_start|>user\nHow much is 2+3?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "output_response": f"Add.</think>{n}<|im_end|>", "score": [0.0, 0.25, 0.5], "stop_reason": "stop",
        "env_class": "sums", "env_extras": {"reward_spec": {"ground_truth": "5"}}, "data_source": "sums/test",
    }  # fmt: skip


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "verifiers": verifiers,
    "trl-completions": trl_completions,
    "verl-dump": verl_dump,
    "skyrl-dump": skyrl_dump,
}
