"""Write tasks/train.jsonl and tasks/heldout.jsonl: arithmetic questions with their answers; tasks/nemo_gym.jsonl: the
first of the training tasks in NeMo Gym's shape; and tasks/tutor.jsonl: questions with what a tutor says to a wrong answer.

Always holds: no pair of operands of a held-out task, in either order and under any operator, occurs in a training task.
The files depend on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OPERATORS = ("+", "-", "*")
WORDINGS = ("What is {}?", "How much is {}?", "Work out {}.")
N_TRAIN = 600
N_HELDOUT = 600
N_NEMO_GYM = 100
N_TUTOR = 300
#: What a tutor says to a first answer that is wrong.
RETRIES = ("Wrong, try again.", "No. Try again.")

Pair = tuple[int, int]


def draw_operands(operator: str, random_: random.Random) -> Pair:
    """Two operands for ``operator``. A difference may be negative; a product has at most five digits."""
    if operator == "*":
        return random_.randint(12, 999), random_.randint(3, 99)
    return random_.randint(12, 999), random_.randint(12, 999)


def pair_of(row: Mapping[str, Any]) -> Pair:
    """A task's operands in ascending order: what must not be shared by the two files."""
    low, high = sorted((int(row["left"]), int(row["right"])))
    return low, high


def value_of(left: int, operator: str, right: int) -> int:
    """What ``left operator right`` is."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def draw_rows(prefix: str, taken: set[Pair], random_: random.Random) -> Iterator[dict[str, Any]]:
    """Endless task rows whose operand pairs are new; each pair is added to ``taken``."""
    number = 0
    while True:
        operator = OPERATORS[number % len(OPERATORS)]
        left, right = draw_operands(operator, random_)
        row = {
            "task_id": f"{prefix}-{number:04d}",
            "prompt": random_.choice(WORDINGS).format(f"{left}{operator}{right}"),
            "answer": str(value_of(left, operator, right)),
            "left": left,
            "operator": operator,
            "right": right,
        }
        if pair_of(row) not in taken:
            taken.add(pair_of(row))
            number += 1
            yield row


def read_pairs(path: Path) -> set[Pair]:
    """The operand pairs of a task file."""
    return {pair_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()}


#: How the calculator's tool is described to a model, in the Responses shape.
TOOL = {
    "type": "function",
    "name": "calculate",
    "description": "Work out an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "Whole numbers joined by +, - or *, for example 12*34."}
        },
        "required": ["expression"],
    },
    "strict": False,
}


def as_nemo_gym(row: Mapping[str, Any]) -> dict[str, Any]:
    """A task row as NeMo Gym writes it: what the model is shown in ``responses_create_params``, tools included."""
    params = {"input": [{"role": "user", "content": row["prompt"]}], "tools": [TOOL]}
    return {"task_id": row["task_id"], "responses_create_params": params, "answer": row["answer"]}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the files and check that training and held-out tasks share no pair."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "tasks")
    arguments = parser.parse_args()

    random_ = random.Random(arguments.seed)
    taken: set[Pair] = set()
    for name, count in (("heldout", N_HELDOUT), ("train", N_TRAIN)):
        rows = draw_rows(name, taken, random_)
        _write(arguments.output / f"{name}.jsonl", (next(rows) for _ in range(count)))
    with (arguments.output / "train.jsonl").open(encoding="utf-8") as lines:
        _write(
            arguments.output / "nemo_gym.jsonl", (as_nemo_gym(json.loads(line)) for line in islice(lines, N_NEMO_GYM))
        )
    tutored = islice(draw_rows("tutor", taken, random_), N_TUTOR)
    _write(arguments.output / "tutor.jsonl", ({**row, "retry": random_.choice(RETRIES)} for row in tutored))
    trained = read_pairs(arguments.output / "train.jsonl") | read_pairs(arguments.output / "tutor.jsonl")
    shared = trained & read_pairs(arguments.output / "heldout.jsonl")
    if shared:
        raise AssertionError(f"training and held-out tasks share operand pairs: {sorted(shared)[:5]}")


if __name__ == "__main__":
    main()
