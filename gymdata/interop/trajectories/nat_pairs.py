"""Preference pairs of the NeMo Agent Toolkit: DPO JSON lines (``prompt``, ``chosen_response``, ``rejected_response``), and
trajectories whose episodes are ``DPOItem``s.

Invariants: reading what is written gives prompt and responses back; a prompt that is text stays text; whatever
else a row says is kept with its messages, so that exporting gives it back. The format holds one text per response: a pair
that has more is left out and counted. Pairs of these files have no token ids, and DPO lines no margin (it is NaN).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from functools import cache
from typing import Any

from gymdata.errors import json_kind
from gymdata.interop.importing import ODD, BadItem, Importing
from gymdata.interop.rows import equal, message_of, number_or_none, refuse_other_name, refuse_surrogates
from gymdata.interop.text_export import TOOLS, has_tools
from gymdata.interop.text_rows import pair_id_of, refuse_contradiction, text_pair
from gymdata.interop.trajectories.own import OWN, list_of, shortest
from gymdata.rollouts.messages import STRICT, JsonObject, Message, PairRow, object_of
from gymdata.store.lines import name_non_finite

#: In a message's ``extra``: what its source has beyond role and content.
_ORIGIN = "nat_dpo"
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
    origin = _origin(pair["chosen"][0]) if len(pair["chosen"]) else {}
    if "trajectory" not in origin and not math.isfinite(pair["margin"]):
        lost[NO_MARGIN] += 1
        return None
    item = _item(pair, lost)
    if item is None:
        return None
    if "trajectory" in origin:
        return {key: [item] if key == "episode" else value for key, value in origin["trajectory"].items()}
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
    origin = _origin(pair["chosen"][0])
    lost[REASONING] += any(side[0].get("reasoning") is not None for side in sides)
    more = ("tool_calls", "reasoning", "name", "tool_call_id")
    lost[PROMPT_CALLS] += any(m.get(key) is not None for m in pair["prompt"] for key in more)
    prompt: Any = []
    for message in pair["prompt"]:
        raw = _origin(message).get("message")
        entry = {"role": message["role"], "content": message["content"] or ""}
        prompt.append(entry if raw is None else {key: raw["values"].get(key, entry.get(key)) for key in raw["keys"]})
    if origin.get("prompt") == "text":
        prompt = pair["prompt"][0]["content"]
    item = {"prompt": prompt} | dict(zip(_RESPONSES, (side[0]["content"] for side in sides), strict=True))
    # Its other fields, and the order of all.
    return {key: item.get(key, origin["row"].get(key)) for key in origin["row"]} if "row" in origin else item


def _origin(message: Message) -> JsonObject:
    extra = json.loads(message["extra"]) if message.get("extra") else {}
    return object_of(object_of(extra).get(_ORIGIN))


def row_of(value: Any, importing: Importing) -> PairRow:
    """The pairs row of a DPO row, or of a trajectory with one DPO item. Raises BadItem."""
    row = _row(value, importing.run_id)
    refuse_contradiction(row["margin"], importing)
    return row | {"pair_id": row["pair_id"] or pair_id_of(importing, row)}


def _row(value: Any, run: str) -> PairRow:
    refuse_surrogates(value)
    if is_dpo_line(value):
        return _pair(value, run, value)
    episode = value.get("episode") if isinstance(value, dict) else None
    if not isinstance(episode, list) or not episode:
        raise BadItem("S103", "neither a DPO row nor a trajectory with DPO items")
    if len(episode) > 1:
        raise BadItem("S102", f"got {len(episode)} DPO items in one trajectory, expected one")
    metadata = object_of(value.get("metadata"))
    pair = _from_own(metadata.get(OWN), value)
    if pair is not None:
        return pair
    rest = {key: None if key == "episode" else field for key, field in value.items()}
    row = _pair(episode[0], run, episode[0], trajectory=rest)
    margins = (number_or_none(metadata.get("score_diff")), number_or_none(value.get("reward")))
    row["margin"] = next((m for m in margins if m is not None), math.nan)
    example = metadata.get("example_id")
    if isinstance(example, str) and example:
        row["task_id"] = example
    return row


def _pair(item: Any, run: str, source: Any, **more: Any) -> PairRow:
    if not isinstance(item, dict):
        raise BadItem("S102", f"got {json_kind(item)}, expected an object")
    for name in _RESPONSES:
        if not isinstance(item.get(name), str):
            raise BadItem("S102", f"{name}: got {item.get(name)!r:.60}, expected text")
    prompt = item.get("prompt")
    origin: JsonObject = dict(more)
    if isinstance(prompt, str):
        messages = [message_of("user", prompt)]
        origin["prompt"] = "text"
    elif isinstance(prompt, list):
        messages = [_read_message(message, k) for k, message in enumerate(prompt)]
    else:
        raise BadItem("S102", f"prompt: got {prompt!r:.60}, expected text or messages")
    if list(item) != ["prompt", *_RESPONSES]:
        origin["row"] = {key: None if key in ("prompt", *_RESPONSES) else source[key] for key in item}
    sides = [message_of("assistant", item[name]) for name in _RESPONSES]
    if origin:
        sides[0]["extra"] = _extra(origin)
    task = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest()
    return text_pair(run, f"prompt-{task}", messages, [sides[0]], [sides[1]])


def _read_message(message: Any, number: int) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadItem("S102", f"prompt[{number}]: expected a message with a role")
    refuse_other_name(message["role"], f"prompt[{number}]")
    content = message.get("content")
    chat_message = message_of(message["role"], content if isinstance(content, str) else STRICT.encode(content))
    if list(message) != ["role", "content"] or chat_message["role"] != message["role"] or not isinstance(content, str):
        values = {k: v for k, v in message.items() if k not in ("role", "content") or chat_message[k] is not v}
        chat_message["extra"] = _extra({"message": {"keys": list(message), "values": values}})
    return chat_message


def _extra(origin: JsonObject) -> str:
    try:
        return STRICT.encode({_ORIGIN: origin})
    except ValueError:
        raise BadItem("S101", "a number that is not finite, in a field that the format does not have") from None


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
