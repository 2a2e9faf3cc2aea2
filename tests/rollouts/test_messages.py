"""Messages in columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.rollouts.messages import split_messages
from gymdata.rollouts.schema import MESSAGE


def message(role: str, content: str, turn: int | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "turn": turn, **more}


def test_messages_split_before_the_first_generated_one() -> None:
    """Few-shot assistant messages belong to the prompt; without turn numbers the last n_turns ones are the model's."""
    numbered = [message("user", "q"), message("assistant", "shot"), message("user", "q2"), message("assistant", "a", 0)]
    unnumbered = [message("user", "q"), message("assistant", "shot"), message("user", "q2"), message("assistant", "a")]
    silent = [message("user", "q")]
    array = pa.array([silent, numbered, unnumbered, []], pa.list_(MESSAGE)).slice(0)
    prompt, rest = split_messages(array, np.array([0, 1, 1, 0]))
    shots = ["q", "shot", "q2"]
    assert [[m["content"] for m in row] for row in prompt.to_pylist()] == [["q"], shots, shots, []]
    assert [[m["content"] for m in row] for row in rest.to_pylist()] == [[], ["a"], ["a"], []]
