"""Clean multi-turn rollouts with known ids, and faults planted in them one at a time.

A planted fault says where it must be found: its code, row, turn and position. Calls are (prompt, generation) id lists.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.rollouts import turns as tokens
from gymdata.rollouts.schema import ROLLOUTS
from tests.rollout_files import rollout, rollouts_table, write_table

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
    return [
        _lists(rollout(f"t{i // 2}", i % 2, float(i % 2), conversation(rng, turns), logprob=-1.003)) for i in range(n)
    ]


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
            "generation_log_probs": [-0.503 - i for i in range(len(generation))],
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


def one_in_two(rows: list[dict[str, Any]], faults: list[Plant]) -> list[dict[str, Any]]:
    """``rows``, two for each of ``faults``, with one of them in every second row."""
    for row, fault in zip(rows[1::2], faults, strict=True):
        fault.make(row)
    return rows


def write_native(folder: Path, rows: list[dict[str, Any]], suffix: str) -> Path:
    path = folder / f"rollouts.{suffix}"
    write_table(rollouts_table(rows), path, ROLLOUTS)
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON lines as Python writes them, NaN literals included; text is written as it is."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def put_nemo(row: dict[str, Any], turn: int, name: str, at: int, value: Any) -> None:
    with_ids(row, turn)[name][at] = value


def drop(row: dict[str, Any], turn: int, *names: str, value: Any = None) -> None:
    for name in names or ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        with_ids(row, turn)[name] = value


def swap(row: dict[str, Any], a: int, b: int) -> None:
    first, second = with_ids(row, a), with_ids(row, b)
    for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        first[name], second[name] = second[name], first[name]


def repeat(row: dict[str, Any], first: int, second: int) -> None:
    with_ids(row, second)["prompt_token_ids"] = with_ids(row, first)["prompt_token_ids"]


def asked(row: dict[str, Any]) -> list[dict[str, Any]]:
    return row["responses_create_params"]["input"]


GENERATED = ("generation_token_ids", "generation_log_probs")


NEMO_PLANTS = [
    Plant("history rewritten", "T200", 2, 1, lambda r: put_nemo(r, 2, "prompt_token_ids", 1, 999)),
    Plant("front dropped", "T204", 3, 0, lambda r: with_ids(r, 3)["prompt_token_ids"].pop(0)),
    Plant("swapped turns", "T208", 2, None, lambda r: swap(r, 1, 2)),
    Plant("repeated prompt", "T211", 3, None, lambda r: repeat(r, 2, 3)),
    Plant("no prompt ids", "T205", 1, None, lambda r: drop(r, 1, "prompt_token_ids")),
    Plant("null ids", "T205", 1, None, lambda r: drop(r, 1)),
    Plant("empty ids", "T205", 1, None, lambda r: drop(r, 1, value=[])),
    Plant("empty generation", "T205", 3, None, lambda r: drop(r, 3, *GENERATED, value=[])),
    Plant("negative id", "T206", 3, 0, lambda r: put_nemo(r, 3, "generation_token_ids", 0, -1)),
    Plant("huge id", "T206", 3, 1, lambda r: put_nemo(r, 3, "generation_token_ids", 1, 2**40)),
    Plant("log-prob missing", "L301", 2, None, lambda r: with_ids(r, 2)["generation_log_probs"].pop()),
    Plant("log-probs missing", "L301", 0, None, lambda r: drop(r, 0, "generation_log_probs")),
    Plant("NaN", "L302", 1, 1, lambda r: put_nemo(r, 1, "generation_log_probs", 1, math.nan)),
    Plant("minus infinity", "L302", 0, 0, lambda r: put_nemo(r, 0, "generation_log_probs", 0, -math.inf)),
    Plant("spelled NaN", "L302", 1, 1, lambda r: put_nemo(r, 1, "generation_log_probs", 1, "NaN")),
    Plant("positive", "L303", 2, 0, lambda r: put_nemo(r, 2, "generation_log_probs", 0, 0.25)),
    Plant("text for an id", "S102", 1, 1, lambda r: put_nemo(r, 1, "prompt_token_ids", 1, "7")),
    Plant("float for an id", "S102", 1, 1, lambda r: put_nemo(r, 1, "prompt_token_ids", 1, 7.0)),
    Plant("boolean for an id", "S102", 1, 1, lambda r: put_nemo(r, 1, "generation_token_ids", 1, True)),
    Plant("id beyond 64 bits", "S102", 1, 1, lambda r: put_nemo(r, 1, "generation_token_ids", 1, 2**70)),
    Plant("nested ids", "S102", 2, 0, lambda r: put_nemo(r, 2, "generation_token_ids", 0, [3])),
    Plant("ids as an object", "S102", 2, None, lambda r: with_ids(r, 2).update(prompt_token_ids={"a": 1})),
    Plant("reward as text", "S102", None, None, lambda r: r.update(reward="good")),
    Plant("no reward", "R501", None, None, lambda r: r.pop("reward")),
    Plant("infinite reward", "R502", None, None, lambda r: r.update(reward=math.inf)),
    Plant("no response", "S103", None, None, lambda r: r.pop("response")),
    Plant("no output", "S103", None, None, lambda r: r["response"].pop("output")),
    Plant("output of the wrong kind", "S102", None, None, lambda r: r["response"].update(output="text")),
    Plant("item of the wrong kind", "S102", None, None, lambda r: r["response"]["output"].append("text")),
    Plant("late system", "M401", None, None, lambda r: asked(r).append({"role": "system", "content": "s"})),
    Plant("unknown call", "M403", None, None, lambda r: r["response"]["output"][2].update(call_id="nobody")),
    Plant("tool output lost", "M402", 1, None, lambda r: r["response"]["output"].pop(2)),
    Plant("no assistant", "M404", None, None, lambda r: r["response"].update(output=[])),
]  # fmt: skip


def turn(row: dict[str, Any], k: int) -> dict[str, Any]:
    return row["turns"][k]


def put(row: dict[str, Any], k: int, name: str, at: int, value: Any) -> None:
    turn(row, k)[name][at] = value


def reseal(row: dict[str, Any]) -> None:
    """Digests that fit, as if the fault had been there when it was collected."""
    for t in row["turns"]:
        above = row["turns"][t["parent"]]["digest"] if 0 <= t["parent"] < len(row["turns"]) else 0
        arrays = [
            np.array(t[n], k)
            for n, k in (
                ("prompt_delta_ids", np.int32), ("generation_token_ids", np.int32), ("generation_log_probs", np.float32)
            )
        ]  # fmt: skip
        t["digest"] = tokens.turn_digest(above, t["prefix_length"], *arrays)


def cut_log_prob(row: dict[str, Any]) -> None:
    turn(row, 2)["generation_log_probs"].pop()
    reseal(row)


def odd_log_prob(value: float) -> Any:
    def make(row: dict[str, Any]) -> None:
        put(row, 1, "generation_log_probs", 1, value)
        reseal(row)

    return make


def odd_id(row: dict[str, Any]) -> None:
    put(row, 3, "prompt_delta_ids", 1, -5)
    reseal(row)


NATIVE_PLANTS = [
    Plant("generated id", "T209", 1, None, lambda r: put(r, 1, "generation_token_ids", 0, 999)),
    Plant("delta id", "T209", 2, None, lambda r: put(r, 2, "prompt_delta_ids", 0, 999)),
    Plant("log-prob", "T209", 0, None, lambda r: put(r, 0, "generation_log_probs", 1, -0.25)),
    Plant("digest", "T209", 3, None, lambda r: turn(r, 3).update(digest=turn(r, 3)["digest"] + 1)),
    Plant("parent is itself", "T210", 2, None, lambda r: turn(r, 2).update(parent=2)),
    Plant("parent below -1", "T210", 2, None, lambda r: turn(r, 2).update(parent=-2)),
    Plant("negative prefix", "T210", 1, None, lambda r: turn(r, 1).update(prefix_length=-1)),
    Plant("prefix too long", "T210", 1, None, lambda r: turn(r, 1).update(prefix_length=10_000)),
    Plant("log-prob missing", "L301", 2, None, cut_log_prob),
    Plant("NaN", "L302", 1, 1, odd_log_prob(math.nan)),
    Plant("minus infinity", "L302", 1, 1, odd_log_prob(-math.inf)),
    Plant("positive", "L303", 1, 1, odd_log_prob(0.5)),
    Plant("negative id", "T206", 3, 1, odd_id),
    Plant("no reward", "R501", None, None, lambda r: r.update(reward=None)),
    Plant("infinite reward", "R502", None, None, lambda r: r.update(reward=math.inf)),
    Plant("bad part", "R502", None, None, lambda r: r.update(rewards=[{"name": "x", "value": math.nan}])),
    Plant("late system", "M401", None, None, lambda r: r["messages"].append({"role": "system", "content": "s"})),
    Plant("two assistants", "M402", None, None, lambda r: r["messages"].append({"role": "assistant", "content": "a"})),
    Plant("unknown call", "M403", None, None, lambda r: r["messages"][3].update(tool_call_id="nobody")),
    Plant("call lost", "M403", None, None, lambda r: r["messages"][2].update(tool_calls=None)),
    Plant("no assistant", "M404", None, None, lambda r: r.update(messages=r["messages"][:2])),
    Plant("falling turns", "T208", 0, None, lambda r: r["messages"][-1].update(turn=0)),
    Plant("turn beyond", "T208", 9, None, lambda r: r["messages"][-1].update(turn=9)),
    Plant("wrong count", "S102", None, None, lambda r: r.update(n_turns=7)),
]
