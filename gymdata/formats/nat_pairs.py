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

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import Importing
from gymdata.formats.conversion.models import Model, OrEmpty, only, read, take_own_row, with_own_row
from gymdata.formats.conversion.nested import Nested
from gymdata.formats.conversion.rows import KINDS, message_of, number_or_none
from gymdata.formats.text.export import TOOLS, has_tools
from gymdata.formats.text.rows import conversation, pair_row, refuse_contradiction
from gymdata.rollouts.messages import JsonObject, PairRow

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
    metadata: Annotated[OrEmpty[JsonObject], only(dict)]


class _Pairs(Nested):
    """Either shape of pairs is read, whatever the format is called."""

    table = "pairs"
    holds_text = True
    group = "task_id"

    def row(self, item: Any, importing: Importing) -> PairRow:
        if not isinstance(item, dict) or "episode" not in item:
            return _pair(item, read(DPOItem, item), importing)
        own = take_own_row(item, "metadata", "pairs")
        if own is not None and own.is_whole:
            refuse_contradiction(own.row["margin"], importing)
            return own.row
        trajectory = read(DPOTrajectory, item)
        margins = number_or_none(trajectory.metadata.get("score_diff")), trajectory.reward
        margin = next((number for number in margins if number is not None), math.nan)
        pair = _pair(item["episode"][0], trajectory.episode[0], importing, margin)
        example = trajectory.metadata.get("example_id")
        return pair | ({"task_id": example} if isinstance(example, str) and example else {})


def _pair(row: JsonObject, item: DPOItem, importing: Importing, margin: float = math.nan) -> PairRow:
    """The pair of an item that is ``row``, in which it may have more columns."""
    sides = [message_of("assistant", item.chosen_response)], [message_of("assistant", item.rejected_response)]
    return pair_row(row, conversation(item.prompt, "prompt"), sides, importing, margin)


@FORMATS.register("nat-dpo-items")
class NatDpoItems(_Pairs):
    """Preference pairs as trajectories of one ``DPOItem`` each."""

    content = "trajectories of DPO items"
    holds_ids = True
    carries = KINDS["pairs"]

    def trajectory(self, row: PairRow, lost: Counter[str]) -> JsonObject | None:
        """Its reward is the margin."""
        margin = row["margin"]
        if not math.isfinite(margin):
            lost[NO_MARGIN] += 1
            return None
        if (item := _item(row, lost)) is None:
            return None
        metadata = {"dpo_type": "preference_pair", "score_diff": margin, "example_id": row["task_id"]}
        trajectory = {"episode": [item], "reward": margin, "shaped_rewards": None, "metadata": metadata}
        return with_own_row(trajectory, "metadata", row)


@FORMATS.register("nat-dpo")
class NatDpo(_Pairs):
    """Preference pairs as JSON lines: ``prompt``, ``chosen_response`` and ``rejected_response``."""

    content = "DPO rows of the NeMo Agent Toolkit"
    suffixes = (".jsonl",)

    def recognise(self, value: Any) -> bool:
        row = value[0] if isinstance(value, list) and value else value
        return isinstance(row, dict) and {"prompt", "chosen_response"} <= row.keys() and "episode" not in row

    def trajectory(self, row: PairRow, lost: Counter[str]) -> JsonObject | None:
        if (item := _item(row, lost)) is not None:
            lost[IDS] += any(len(row[name]) for name in _LISTS)
            lost[TOOLS] += has_tools(row)
            lost[MARGINS] += row["margin"] == row["margin"] or row["weight"] != 1
        return item


def _item(pair: PairRow, lost: Counter[str]) -> JsonObject | None:
    """The ``DPOItem`` of a pair (as ``to_rows`` gives it); None when it has no place in the format."""
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
    return {"prompt": prompt, "chosen_response": chosen, "rejected_response": rejected}
