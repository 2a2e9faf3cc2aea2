"""Tasks of two turns and their user: a sentence about a person becomes JSON; the user shows the right answer, whatever the
model's is, and gives a second sentence, whose answer is scored.

``collect sample_data/tasks/lessons-train.jsonl --user sample_data/lessons.py:teach``. Run this file to write the tasks.
Invariants: no name, city or job of a held-out task occurs in a training task. The files depend on the seed alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gymdata import Step
from gymdata.sample_data import sentences


def teach(messages: list[dict[str, Any]], task: dict[str, Any]) -> Step:
    """After the first answer, the right one and the second sentence; then the reward, which ends the rollout."""
    if sum(message["role"] == "user" for message in messages) == 1:
        return Step(f"Right is:\n{json.dumps(task['shown'])}\n{task['second']}")
    reward = sentences.right_values(messages[-1]["content"] or "", task["answer"])
    return Step(reward=reward, done=True, stop_reason="answered")


def tasks(name: str, values: dict[str, list[str]], random_: random.Random) -> Iterator[dict[str, Any]]:
    """Endless tasks with different prompts, each with two sentences that ask for the same keys."""
    rows, kinds = sentences.tasks(name, values, random_), len(sentences.SENTENCES)
    while True:
        # Their keys take turns.
        firsts, seconds = ([next(rows) for _ in range(kinds)] for _ in range(2))
        for first, second in zip(firsts, seconds, strict=True):
            yield {
                "prompt": first["prompt"],
                "shown": first["answer"],
                "second": second["prompt"],
                "answer": second["answer"],
            }


def main(folder: Path = Path(__file__).parent / "tasks") -> None:
    random_, parts = random.Random(2), (("lessons-heldout", 100, 0), ("lessons-train", 200, 1))
    shuffled = {key: random_.sample(words.split(), len(words.split())) for key, words in sentences.WORDS.items()}
    for name, count, part in parts:
        rows = tasks(name, {key: words[part::2] for key, words in shuffled.items()}, random_)
        numbered = ({"task_id": f"{name}-{number:04d}", **next(rows)} for number in range(count))
        text = "".join(json.dumps(row) + "\n" for row in numbered)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
