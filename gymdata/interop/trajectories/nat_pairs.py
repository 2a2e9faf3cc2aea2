"""Preference pairs of the NeMo Agent Toolkit: DPO JSON lines (``prompt``, ``chosen_response``, ``rejected_response``), and
trajectories whose episodes are ``DPOItem``s.

Invariants: reading what is written gives prompt and responses back. The format holds one text per response: a pair
that has more is left out and counted. Pairs of these files have no token ids, and DPO lines no margin (it is NaN).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

from gymdata.errors import json_kind
from gymdata.interop.importing import ODD, BadItem, Importing
from gymdata.interop.rows import equal, message_of, number_or_none, refuse_surrogates
from gymdata.interop.text_export import TOOLS, has_tools
from gymdata.interop.text_rows import conversation, pair_id_of, pair_row, refuse_contradiction
from gymdata.interop.trajectories.own import OWN, list_of, shortest
from gymdata.rollouts.messages import JsonObject, PairRow, object_of
from gymdata.store.lines import name_non_finite

_RESPONSES = ("chosen_response", "rejected_response")
SEVERAL = "pairs with a response of several messages (left out: the format has one text)"
CALLS = "pairs with a response that is a tool call (left out: the format has one text)"
NO_MARGIN = "pairs without a margin (left out: the format has a reward)"
IDS, MARGINS = "token ids and log-probabilities", "margins and weights"
PROMPT_CALLS = "tool calls, reasoning and names in prompts"
REASONING = "reasoning of responses"
_LISTS = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
_FLOATS = ("chosen_logprobs", "rejected_logprobs")


@cache
def _own_columns() -> dict[str, bool]:
    """The columns besides the messages, and whether a pair must have them."""
    from gymdata.rollouts.schema import PAIRS  # loads pyarrow

    names = [name for name in PAIRS.schema.names if name not in ("prompt", "chosen", "rejected")]
    return {name: name not in PAIRS.optional for name in names}


def is_dpo_line(value: Any) -> bool:
    """Whether a JSON value is a row of DPO JSON lines."""
    return isinstance(value, dict) and "prompt" in value and "chosen_response" in value and "episode" not in value


def dpo_line(pair: PairRow, lost: Counter[str]) -> JsonObject | None:
    """The row of DPO JSON lines of a pair (as ``to_rows`` gives it); None when it has no place in the format."""
    item = _item(pair, lost)
    if item is not None:
        lost[IDS] += any(len(pair[name]) for name in _LISTS)
        lost[TOOLS] += has_tools(pair)
        lost[MARGINS] += pair["margin"] == pair["margin"] or pair["weight"] != 1
    return item


def dpo_trajectory(pair: PairRow, lost: Counter[str]) -> JsonObject | None:
    """The ``Trajectory`` with one ``DPOItem`` of a pair; its reward is the margin. None when it has no place."""
    if not math.isfinite(pair["margin"]):
        lost[NO_MARGIN] += 1
        return None
    item = _item(pair, lost)
    if item is None:
        return None
    about = {"dpo_type": "preference_pair", "score_diff": pair["margin"], "example_id": pair["task_id"]}
    columns: PairRow = {}
    for name in _own_columns():
        value = pair.get(name)
        if name in _LISTS:
            value = [int(v) for v in list_of(value)]
        elif name in _FLOATS:
            value = [shortest(v) for v in list_of(value)]
        elif name == "temperature":
            value = shortest(value)
        if name in pair:
            columns[name] = name_non_finite(value)
    sides = {side: [dict(m) for m in pair[side]] for side in ("prompt", "chosen", "rejected")}
    return {
        "episode": [item],
        "reward": pair["margin"],
        "shaped_rewards": None,
        "metadata": about | {OWN: columns | {"messages": sides}},
    }


def _item(pair: PairRow, lost: Counter[str]) -> JsonObject | None:
    sides = [pair["chosen"], pair["rejected"]]
    if any(len(side) != 1 for side in sides):
        lost[SEVERAL] += 1
        return None
    if any(side[0]["content"] is None or side[0].get("tool_calls") for side in sides):
        lost[CALLS] += 1
        return None
    lost[REASONING] += any(side[0].get("reasoning") is not None for side in sides)
    more = ("tool_calls", "reasoning", "name", "tool_call_id")
    lost[PROMPT_CALLS] += any(m.get(key) is not None for m in pair["prompt"] for key in more)
    prompt = [{"role": message["role"], "content": message["content"] or ""} for message in pair["prompt"]]
    return {"prompt": prompt} | dict(zip(_RESPONSES, (side[0]["content"] for side in sides), strict=True))


def row_of(value: Any, importing: Importing) -> PairRow:
    """The pairs row of a DPO row, or of a trajectory with one DPO item. Raises BadItem."""
    refuse_surrogates(value)
    if is_dpo_line(value):
        return _pair(value, importing)
    episode = value.get("episode") if isinstance(value, dict) else None
    if not isinstance(episode, list) or not episode:
        raise BadItem("S103", "neither a DPO row nor a trajectory with DPO items")
    if len(episode) > 1:
        raise BadItem("S102", f"got {len(episode)} DPO items in one trajectory, expected one")
    metadata = object_of(value.get("metadata"))
    if (pair := _from_own(metadata.get(OWN), value)) is not None:
        refuse_contradiction(pair["margin"], importing)
        return pair | {"pair_id": pair["pair_id"] or pair_id_of(importing, pair)}
    margins = (number_or_none(metadata.get("score_diff")), number_or_none(value.get("reward")))
    pair = _pair(episode[0], importing, next((m for m in margins if m is not None), math.nan))
    example = metadata.get("example_id")
    return pair | ({"task_id": example} if isinstance(example, str) and example else {})


def _pair(item: Any, importing: Importing, margin: float = math.nan) -> PairRow:
    if not isinstance(item, dict):
        raise BadItem("S102", f"got {json_kind(item)}, expected an object")
    for name in _RESPONSES:
        if not isinstance(item.get(name), str):
            raise BadItem("S102", f"{name}: got {item.get(name)!r:.60}, expected text")
    chosen, rejected = ([message_of("assistant", item[name])] for name in _RESPONSES)
    return pair_row(item, conversation(item.get("prompt"), "prompt"), (chosen, rejected), importing, margin)


def _from_own(facts: Any, trajectory: JsonObject) -> PairRow | None:
    """Our own pair, when the trajectory still says what we wrote."""
    if not isinstance(facts, dict):
        return None
    sides = facts.get("messages")
    required = {name for name, must_be in _own_columns().items() if must_be}
    if not required <= facts.keys() or not isinstance(sides, dict) or set(sides) != {"prompt", "chosen", "rejected"}:
        return None
    row = {name: facts[name] for name in _own_columns() if name in facts} | sides
    try:
        return row if equal(dpo_trajectory(row, Counter()), trajectory) else None
    except ODD:
        # Not what we write, so it is a trajectory like any other.
        return None
