"""Preference pairs of the NeMo Agent Toolkit: DPO JSON lines (``prompt``, ``chosen_response``, ``rejected_response``), and
trajectories whose episodes are ``DPOItem``s.

Invariants: reading what is written gives prompt and responses back. The format holds one text per response: a pair
that has more is left out and counted. Pairs of these files have no token ids, and DPO lines no margin (it is NaN).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gymdata.formats.conversion.importing import ODD, Importing
from gymdata.formats.conversion.rows import equal, message_of, number_or_none
from gymdata.formats.text.export import TOOLS, has_tools
from gymdata.formats.text.rows import conversation, pair_id_of, pair_row, refuse_contradiction
from gymdata.formats.trajectories.nat import only
from gymdata.formats.trajectories.own import Model, list_of, read, shortest
from gymdata.rollouts.messages import JsonObject, PairRow
from gymdata.rollouts.schema import PAIRS
from gymdata.store.lines import name_non_finite

SEVERAL = "pairs with a response of several messages (left out: the format has one text)"
CALLS = "pairs with a response that is a tool call (left out: the format has one text)"
NO_MARGIN = "pairs without a margin (left out: the format has a reward)"
IDS, MARGINS = "token ids and log-probabilities", "margins and weights"
PROMPT_CALLS = "tool calls, reasoning and names in prompts"
REASONING = "reasoning of responses"
_LISTS = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
_FLOATS = ("chosen_logprobs", "rejected_logprobs")


class DPOItem(Model):
    prompt: Any
    chosen_response: str
    rejected_response: str


class Metadata(Model):
    dpo_type: Any = None
    score_diff: Annotated[float | None, BeforeValidator(number_or_none)] = None
    example_id: Annotated[str | None, only(str)] = None
    gymdata: Annotated[JsonObject | None, only(dict)] = None


class DPOTrajectory(Model):
    episode: list[DPOItem] = Field(min_length=1, max_length=1)
    reward: Annotated[float | None, BeforeValidator(number_or_none)] = None
    shaped_rewards: Any = None
    metadata: Annotated[Metadata | None, only((dict, Metadata))] = None


def dpo_line(pair: PairRow, lost: Counter[str]) -> JsonObject | None:
    """The row of DPO JSON lines of a pair (as ``to_rows`` gives it); None when it has no place in the format."""
    item = _item(pair, lost)
    if item is None:
        return None
    lost[IDS] += any(len(pair[name]) for name in _LISTS)
    lost[TOOLS] += has_tools(pair)
    lost[MARGINS] += pair["margin"] == pair["margin"] or pair["weight"] != 1
    return item.written()


def dpo_trajectory(pair: PairRow, lost: Counter[str]) -> JsonObject | None:
    """The ``Trajectory`` with one ``DPOItem`` of a pair; its reward is the margin. None when it has no place."""
    if not math.isfinite(pair["margin"]):
        lost[NO_MARGIN] += 1
        return None
    item = _item(pair, lost)
    if item is None:
        return None
    own = pair | {name: list_of(pair[name]) for name in _LISTS} | {"temperature": shortest(pair["temperature"])}
    own |= {name: [shortest(value) for value in list_of(pair[name])] for name in _FLOATS}
    about = {"dpo_type": "preference_pair", "score_diff": pair["margin"], "example_id": pair["task_id"]}
    return DPOTrajectory(
        episode=[item],
        reward=pair["margin"],
        shaped_rewards=None,
        metadata=Metadata(**about, gymdata=name_non_finite(own)),
    ).written()


def _item(pair: PairRow, lost: Counter[str]) -> DPOItem | None:
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
    chosen, rejected = (side[0]["content"] for side in sides)
    return DPOItem(prompt=prompt, chosen_response=chosen, rejected_response=rejected)


def row_of(value: Any, importing: Importing) -> PairRow:
    """The pairs row of a DPO row, or of a trajectory with one DPO item. Raises BadItem."""
    if not isinstance(value, dict) or "episode" not in value:
        return _pair(value, read(DPOItem, value), importing)
    trajectory = read(DPOTrajectory, value)
    metadata = trajectory.metadata or Metadata()
    if (pair := _from_own(metadata.gymdata, value)) is not None:
        refuse_contradiction(pair["margin"], importing)
        return pair | {"pair_id": pair["pair_id"] or pair_id_of(importing, pair)}
    margin = next((m for m in (metadata.score_diff, trajectory.reward) if m is not None), math.nan)
    pair = _pair(value["episode"][0], trajectory.episode[0], importing, margin)
    return pair | ({"task_id": metadata.example_id} if metadata.example_id else {})


def _pair(row: JsonObject, item: DPOItem, importing: Importing, margin: float = math.nan) -> PairRow:
    """The pair of an item that is ``row``, in which it may have more columns."""
    sides = [message_of("assistant", item.chosen_response)], [message_of("assistant", item.rejected_response)]
    return pair_row(row, conversation(item.prompt, "prompt"), sides, importing, margin)


def _from_own(pair: PairRow | None, trajectory: JsonObject) -> PairRow | None:
    """Our own pair, when the trajectory still says what we wrote."""
    if pair is None or not pair.keys() >= {*PAIRS.required()}:
        return None
    try:
        return pair if equal(dpo_trajectory(pair, Counter()), trajectory) else None
    except ODD:
        # Not what we write, so it is a trajectory like any other.
        return None
