"""Faults that are planted in rows of rollouts, each with its code and place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gymdata.rollouts import turns as tokens
from tests.validate.generate import Plant


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


PLANTS = [
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
    Plant("negative id", "T206", 3, -1, odd_id),
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
