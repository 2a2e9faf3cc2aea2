"""Clean multi-turn rollouts with known ids, and faults planted in them one at a time.

A planted fault says where it must be found: its code, row, turn and position. Calls are (prompt, generation) id lists.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import write_table
from tests.rollout_files import rollout, rollouts_table

VOCAB = 1000


def conversation(rng: np.random.Generator, turns: int = 4) -> list[tuple[list[int], list[int]]]:
    """Calls that continue each other; no id occurs twice in one conversation, so every change is a difference."""
    ids = iter(rng.permutation(VOCAB - 10).tolist())

    def some() -> list[int]:
        return [next(ids) for _ in range(int(rng.integers(2, 9)))]

    calls = []
    held: list[int] = []
    for _ in range(turns):
        prompt, generation = [*held, *some()], some()
        calls.append((prompt, generation))
        held = prompt + generation
    return calls


def native_rows(n: int = 6, turns: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Clean rollouts rows in groups of two with different rewards."""
    rng = np.random.default_rng(seed)
    return [_lists(rollout(f"t{i // 2}", i % 2, float(i % 2), conversation(rng, turns))) for i in range(n)]


def _lists(row: dict[str, Any]) -> dict[str, Any]:
    """Turns with Python lists, so that faults can be planted."""
    turns = [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in t.items()} for t in row["turns"]]
    return {**row, "turns": turns, "messages": chat(len(turns))}


def chat(turns: int) -> list[dict[str, Any]]:
    """A conversation in which every turn but the last calls a tool."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for turn in range(turns):
        call = [{"id": f"c{turn}", "type": "function", "function": {"name": "f", "arguments": {}}}]
        last = turn == turns - 1
        words = "done" if last else None
        said.append(
            {"role": "assistant", "turn": turn, "content": words, "tool_calls": None if last else json.dumps(call)}
        )
        if not last:
            said.append({"role": "tool", "content": "r", "tool_call_id": f"c{turn}"})
    return said


def nemo_rows(n: int = 6, turns: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """The same as NeMo Gym rows."""
    rng = np.random.default_rng(seed)
    return [nemo_row(conversation(rng, turns), f"q{i // 2}", float(i % 2), i) for i in range(n)]


def nemo_row(calls: list[tuple[list[int], list[int]]], question: str, reward: float, index: int) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    for turn, (prompt, generation) in enumerate(calls):
        output.append(
            {"type": "reasoning", "id": f"rs_{turn}", "summary": [{"text": "Hm [1].", "type": "summary_text"}]}
        )
        ids = {
            "prompt_token_ids": prompt,
            "generation_token_ids": generation,
            "generation_log_probs": [-0.5 - i for i in range(len(generation))],
        }
        if turn == len(calls) - 1:
            text = [{"type": "output_text", "text": "done", "annotations": []}]
            output.append({"type": "message", "role": "assistant", "content": text, **ids})
        else:
            output.append({"type": "function_call", "call_id": f"c{turn}", "name": "f", "arguments": "{}", **ids})
            output.append({"type": "function_call_output", "call_id": f"c{turn}", "output": "r"})
    params = {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": question}], "tools": []}
    return {"responses_create_params": params, "response": {"id": f"r{index}", "output": output}, "reward": reward}


def with_ids(row: dict[str, Any], turn: int) -> dict[str, Any]:
    """The output item that ends a NeMo Gym row's model call."""
    return [i for i in row["response"]["output"] if "prompt_token_ids" in i][turn]


@dataclass(frozen=True)
class Plant:
    """A fault: how it is made, and where it must be found. ``position`` None when none is said."""

    name: str
    code: str
    turn: int | None
    position: int | None
    make: Callable[[dict[str, Any]], None]


def plant(rows: list[dict[str, Any]], fault: Plant, row: int) -> list[dict[str, Any]]:
    """A copy of ``rows`` with the fault in ``row``."""
    changed = copy.deepcopy(rows)
    fault.make(changed[row])
    return changed


def write_native(folder: Path, rows: list[dict[str, Any]], suffix: str) -> Path:
    path = folder / f"rollouts.{suffix}"
    write_table(rollouts_table(rows), path, ROLLOUTS)
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON lines as Python writes them, NaN literals included; text is written as it is."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path
