"""Dumps of other systems for tests: their rows as literal ids, and what an import makes of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from gymdata.formats import format_named
from gymdata.formats.conversion.importing import Importing, Numbering, Rejected
from gymdata.rollouts.turns import expand_prompts
from gymdata.store.paths import resolve

#: Files that verl 0.9.1 wrote of the rows of ``VERL``: ``DataProto.save_to_disk`` (verl/protocol.py), also with
#: VERL_DATAPROTO_SERIALIZATION_METHOD=numpy, and ``RolloutTqSkip.prepare_data`` (verl/utils/skip/rollout_skip.py)
#: with tensors as ``AgentLoopOutput.as_dict`` (verl/experimental/agent_loop/agent_loop.py) has them.
DUMPS = Path(__file__).parent / "dumps"
#: (prompt ids, [(context ids, sampled ids, log-probabilities)], reward) of each rollout.
VERL = [
    ([5, 6], [([], [1, 2], [-0.5, -0.25]), ([3], [9], [-1.0])], 1.0),
    ([5, 6], [([], [1, 2], [-0.5, -0.25])], 0.5),
    ([7], [([], [8], [-2.0])], 0.0),
]


def read(file: Path, name: str) -> tuple[list[dict[str, Any]], list[Rejected]]:
    """The rows of a file in the format ``name``, and those that are turned down."""
    named: list[Rejected] = []
    importing = Importing("r", Numbering(text=format_named(name).holds_text), named.append)
    return [row for _, row in format_named(name).read(resolve(file), importing)], named


def sequences(rows: list[dict[str, Any]]) -> list[Any]:
    """The rows as ``VERL`` has them: what each turn adds to the turn before it, which it continues."""
    made = []
    for row in rows:
        turns, prompts = row["turns"], expand_prompts(row["turns"])
        spans, before = [], len(prompts[0])
        for turn, prompt in zip(turns, prompts, strict=True):
            log_probs = [None if x != x else float(x) for x in turn["generation_log_probs"]]
            spans.append((prompt[before:].tolist(), turn["generation_token_ids"].tolist(), log_probs))
            before = len(prompt) + len(turn["generation_token_ids"])
        made.append((prompts[0].tolist(), spans, row["reward"]))
    return made


def pickled(module: str, name: str, state: Any) -> bytes:
    """The pickle of an object of a class that is not installed here, with the state that ``__setstate__`` gets."""
    return b"\x80\x03c" + f"{module}\n{name}\n".encode() + b")\x81" + pickle.dumps(state, 3)[2:-1] + b"b."
