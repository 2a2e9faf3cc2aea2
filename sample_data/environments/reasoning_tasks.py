"""Questions of the package reasoning-gym, scored by its own verifiers.

Run this file with a family and settings of it to get the tasks, ``chain_sum size=200 max_terms=4 > sums.jsonl``, and play
them with ``collect sums.jsonl --env reasoning_tasks.py:Question``. The reward is that of what stands in the last
``<answer>…</answer>``, or of the whole answer. A verifier that raises is a failure of the environment, never a score.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


class Question:
    """One question of a family."""

    def reset(self, family: str, settings: Mapping[str, Any], index: int, **_: Any) -> None:
        self._family = _family(family, json.dumps(settings, sort_keys=True))
        self._entry = self._family[index]

    def step_reward(self, message: Mapping[str, Any]) -> float:
        text = message["content"] or ""
        answer = extract_answer(text)
        return float(self._family.score_answer(text.strip() if answer is None else answer, self._entry))


@cache
def _family(name: str, settings: str) -> Any:
    return reasoning_gym.create_dataset(name, **json.loads(settings))


def tasks(family: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """A row for each question, with what ``Question`` needs to make it again."""
    settings = {"seed": 0, **settings}
    questions = _family(family, json.dumps(settings, sort_keys=True))
    for index in range(len(questions)):
        entry = questions[index]
        row = {"task_id": f"{family}-{index}", "prompt": entry["question"], "answer": entry["answer"]}
        yield row | {"family": family, "settings": settings, "index": index}


if __name__ == "__main__":
    given = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    sys.stdout.writelines(json.dumps(row) + "\n" for row in tasks(sys.argv[1], **given))
