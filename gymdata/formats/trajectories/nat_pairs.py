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

from gymdata.formats.conversion.importing import Importing
from gymdata.formats.conversion.rows import message_of, number_or_none
from gymdata.formats.text.export import TOOLS, has_tools
from gymdata.formats.text.rows import conversation, pair_row, refuse_contradiction
from gymdata.formats.trajectories.own import Model, only, read, take_own_row, with_own_row
from gymdata.rollouts.messages import JsonObject, PairRow
from gymdata.rollouts.schema import PAIRS

SEVERAL = "pairs with a response of several messages (left out: the format has one text)"
CALLS = "pairs with a response that is a tool call (left out: the format has one text)"
NO_MARGIN = "pairs without a margin (left out: the format has a reward)"
IDS, MARGINS = "token ids and log-probabilities", "margins and weights"
PROMPT_CALLS = "tool calls, reasoning and names in prompts"
REASONING = "reasoning of responses"
_LISTS = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")


class DPOItem(Model):
    prompt: Any
    chosen_response: str
    rejected_response: str


class DPOTrajectory(Model):
    episode: list[DPOItem] = Field(min_length=1, max_length=1)
    reward: Annotated[float | None, BeforeValidator(number_or_none)] = None
    shaped_rewards: Any = None
    metadata: Annotated[JsonObject | None, only(dict)] = None


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
    trajectory = DPOTrajectory(
        episode=[item],
        reward=pair["margin"],
        shaped_rewards=None,
        metadata={"dpo_type": "preference_pair", "score_diff": pair["margin"], "example_id": pair["task_id"]},
    )
    return with_own_row(trajectory.written(), "metadata", pair)


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
    own = take_own_row(value, "metadata", PAIRS)
    if own is not None and own.is_whole:
        refuse_contradiction(own.row["margin"], importing)
        return own.row
    trajectory = read(DPOTrajectory, value)
    metadata = trajectory.metadata or {}
    margins = number_or_none(metadata.get("score_diff")), trajectory.reward
    margin = next((m for m in margins if m is not None), math.nan)
    pair = _pair(value["episode"][0], trajectory.episode[0], importing, margin)
    example = metadata.get("example_id")
    return pair | ({"task_id": example} if isinstance(example, str) and example else {})


def _pair(row: JsonObject, item: DPOItem, importing: Importing, margin: float = math.nan) -> PairRow:
    """The pair of an item that is ``row``, in which it may have more columns."""
    sides = [message_of("assistant", item.chosen_response)], [message_of("assistant", item.rejected_response)]
    return pair_row(row, conversation(item.prompt, "prompt"), sides, importing, margin)
