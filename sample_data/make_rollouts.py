"""Write rollouts/: a few that the sample policy really played, the same with one planted fault each, and NeMo Gym's shape.

Always holds: clean.jsonl is a choice of rows of a run that `gymdata collect` sealed, unchanged; every row of broken.jsonl
is one of them with exactly one fault, and FAULTS says which code must be found at which turn.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.rollouts.turns import expand_prompts, turn_digest
from gymdata.sample_data.make_tasks import HERE
from gymdata.store.lines import encode

Row = dict[str, Any]
N_TASKS = 8
PER_TASK = 3


@dataclass(frozen=True)
class Fault:
    """The fault planted in the row of broken.jsonl that has its place in FAULTS; ``code`` must be reported at ``turn``."""

    code: str
    turn: int | None
    what: str
    plant: Callable[[Row], None]


def _set(turn: int, field: str, at: int, value: float) -> Callable[[Row], None]:
    def plant(row: Row) -> None:
        row["turns"][turn][field][at] = value

    return plant


def _sealed(plant: Callable[[Row], None]) -> Callable[[Row], None]:
    """The fault with digests that fit, as if it had been there when the rollout was collected."""

    def planted(row: Row) -> None:
        plant(row)
        above = 0
        for turn in row["turns"]:
            arrays = (
                np.array(turn["prompt_delta_ids"], np.int32),
                np.array(turn["generation_token_ids"], np.int32),
                np.array(turn["generation_log_probs"], np.float32),
            )
            above = turn["digest"] = turn_digest(above, turn["prefix_length"], *arrays)

    return planted


def _lose_log_prob(row: Row) -> None:
    row["turns"][0]["generation_log_probs"].pop()


def _break(row: Row) -> None:
    """The second prompt forgets the last four tokens of the first generation, as a re-rendered history might."""
    turn = row["turns"][1]
    turn["prefix_length"] -= 4
    row["n_breaks"] = 1
    row["n_context_tokens"] = sum(len(t["prompt_delta_ids"]) for t in row["turns"])


def _prefix_too_long(row: Row) -> None:
    row["turns"][1]["prefix_length"] = 9999


def _forget_tool_call(row: Row) -> None:
    for message in row["messages"]:
        message["tool_calls"] = None


FAULTS = [
    Fault("T209", 0, "a generated id changed after collection", _set(0, "generation_token_ids", 2, 7)),
    Fault("T209", 1, "an id of the tool's answer changed after collection", _set(1, "prompt_delta_ids", 3, 7)),
    Fault("T209", 1, "a log-probability changed after collection", _set(1, "generation_log_probs", 0, -3.5)),
    Fault("T210", 1, "a prefix longer than what came before", _sealed(_prefix_too_long)),
    Fault("T200", 1, "a prompt that does not extend what came before", _sealed(_break)),
    Fault("T206", 0, "a negative token id", _sealed(_set(0, "generation_token_ids", 1, -1))),
    Fault("L301", 0, "one log-probability too few", _sealed(_lose_log_prob)),
    Fault(
        "L302", 1, "a log-probability that is not a number", _sealed(_set(1, "generation_log_probs", 0, float("nan")))
    ),
    Fault("L303", 1, "a positive log-probability", _sealed(_set(1, "generation_log_probs", 0, 0.25))),
    Fault(
        "M401", None, "a system message at the end", lambda row: row["messages"].append(_message("system", "Hello."))
    ),
    Fault("M403", None, "a tool result that nobody asked for", _forget_tool_call),
    Fault("M404", None, "no message of the policy", lambda row: row.update(messages=row["messages"][:1])),
    Fault("R502", None, "an infinite reward", lambda row: row.update(reward=float("inf"))),
    Fault("S102", None, "a count that disagrees with the turns", lambda row: row.update(n_turns=5)),
]


def _message(role: str, content: str) -> Row:
    names = ("reasoning", "tool_calls", "tool_call_id", "name", "turn", "extra")
    return {"role": role, "content": content, **dict.fromkeys(names)}


def choose(rows: list[Row]) -> list[Row]:
    """PER_TASK two-turn rollouts of each of N_TASKS tasks: no two generations alike, some right and some wrong."""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["n_turns"] == 2 and row["status"] == "completed":
            spelled = json.dumps([turn["generation_token_ids"] for turn in row["turns"]])
            groups.setdefault(row["task_id"], {}).setdefault(spelled, row)
    chosen: list[Row] = []
    for group in groups.values():
        ranked = sorted(group.values(), key=lambda row: -row["reward"])
        picked = [*ranked[:1], *ranked[1 - PER_TASK :]] if len(ranked) >= PER_TASK else []
        if {row["reward"] for row in picked} == {0.0, 1.0}:
            chosen += picked
    if len(chosen) < N_TASKS * PER_TASK:
        raise SystemExit(f"the run has only {len(chosen) // PER_TASK} groups to choose from, {N_TASKS} are needed")
    return chosen[: N_TASKS * PER_TASK]


def broken(rows: list[Row]) -> list[Row]:
    """One row a fault, in the order of FAULTS; their rollouts and tasks differ, so that only the fault is reported."""
    planted = []
    for fault, row in zip(FAULTS, rows, strict=False):
        changed = copy.deepcopy(row)
        fault.plant(changed)
        planted.append(changed)
    return planted


def to_nemo_gym(row: Mapping[str, Any]) -> Row:
    """A rollout as NeMo Gym writes it: whole prompts, a model call's ids on the last item that it produced."""
    turns = [{k: np.array(v) if isinstance(v, list) else v for k, v in turn.items()} for turn in row["turns"]]
    evidence = [
        {
            "prompt_token_ids": prompt.tolist(),
            "generation_token_ids": turn["generation_token_ids"],
            "generation_log_probs": turn["generation_log_probs"],
        }
        for prompt, turn in zip(expand_prompts(turns), row["turns"], strict=True)
    ]
    output: list[Row] = []
    for message in row["messages"]:
        own = evidence[message["turn"]] if message["turn"] is not None else {}
        if message["role"] == "tool":
            output.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
        elif message["role"] == "assistant" and message["tool_calls"]:
            (call,) = json.loads(message["tool_calls"])
            wanted = {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
            output.append({"type": "function_call", "call_id": call["id"], **wanted, **own})
        elif message["role"] == "assistant":
            text = [{"type": "output_text", "text": message["content"], "annotations": []}]
            output.append({"type": "message", "role": "assistant", "status": "completed", "content": text, **own})
    asked = [{"role": m["role"], "content": m["content"]} for m in row["messages"] if m["role"] in ("system", "user")]
    tools = [{"type": "function", **tool["function"]} for tool in json.loads(row["tools"])]
    return {
        "responses_create_params": {"input": asked, "tools": tools, "temperature": row["temperature"]},
        "response": {"id": row["rollout_id"], "object": "response", "output": output},
        "reward": row["reward"],
    }


def main() -> None:
    """Choose rollouts of a run folder collected with --format jsonl, and write the three files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "rollouts")
    arguments = parser.parse_args()
    arguments.output.mkdir(exist_ok=True)

    parts = sorted((arguments.run / "rollouts").glob("part-*.jsonl"))
    rows = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    clean = choose(rows)
    for name, some in (("clean", clean), ("broken", broken(clean)), ("nemo_gym", [to_nemo_gym(row) for row in clean])):
        lines = [encode(row) + b"\n" for row in some]
        (arguments.output / f"{name}.jsonl").write_bytes(b"".join(lines))


if __name__ == "__main__":
    main()
