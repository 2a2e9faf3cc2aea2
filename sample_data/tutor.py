"""The user of the tutored tasks: ends the conversation when the answer is right, and gives one second try when it is not.

``collect sample_data/tasks/tutor.jsonl --env sample_data/calculator.py:Calculator --user sample_data/tutor.py:tutor``
"""

from __future__ import annotations

from typing import Any

from gymdata import Step

#: What an answer is worth: on the first try, on the second, and when it is wrong.
FIRST, SECOND, WRONG = 1.0, 0.5, 0.0


def tutor(messages: list[dict[str, Any]], task: dict[str, Any]) -> Step:
    """What is said to the last message of ``messages``: the policy's answer to ``task``."""
    tries = sum(message["role"] == "user" for message in messages)
    if (messages[-1]["content"] or "").strip() == task["answer"]:
        return Step(reward=FIRST if tries == 1 else SECOND, done=True, stop_reason="answered")
    if tries == 1:
        return Step(task.get("retry", "Wrong, try again."), reward=WRONG)
    return Step(reward=WRONG, done=True, stop_reason="not_answered")
