"""Rollouts as NeMo Gym rows, with whole prompts on the item that ends each model call.

Invariants: a row that was imported is written as it was (log-probabilities as float32), whatever of it has no
column included; of other rollouts the messages become items, and turns that no message names are counted, never dropped
in silence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import orjson

from gymdata.interop.nemo_gym.read import RENDERED, ROUNDED, kept_rows
from gymdata.interop.nemo_gym.rows import reward_of
from gymdata.interop.nemo_gym.token_text import Text, numbers
from gymdata.interop.trajectories.own import shortest
from gymdata.rollouts.failures import UNSCORED
from gymdata.rollouts.messages import (
    GENERATION,
    LOG_PROBS,
    PROMPT,
    JsonObject,
    RolloutRow,
    items_of,
    loads,
    object_of,
    response_tools,
    with_call_ids,
)

#: Columns that a NeMo Gym row has no place for; they go into its object "gymdata".
_OWN = (
    *("run_id", "task_id", "group_id", "rollout_index", "policy", "policy_hash", "policy_version"),
    *("status", "stop_reason", "rewards", "duration_s"),
)

#: Fields of a function among the tools of a request, of which NeMo Gym's model allows no others and needs the last two.
_FUNCTION = ("type", "name", "description", "parameters", "strict")
#: Reasons of a stop that cut the last generation itself, which have one name in the Responses shape.
_CUT = ("max_output_tokens", "max_tokens", "max_context", "length", "repetition")

#: Placeholder of list n, whose text is inserted afterwards; and the placeholder in the row's JSON.
_PLACE = "\0list {}\0"
_PLACED = re.compile(rb'"\\u0000list (\d+)\\u0000"')
#: Numbers that are not finite are written as Python writes them, which NeMo Gym reads.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
#: A list's text in a row.
Lists = Callable[[Text], Any]


class Line(NamedTuple):
    """A written row. ``turns``: those that an item holds, None for all; ``rounded``: whether it was imported from
    log-probabilities with more digits than float32 holds."""

    text: bytes
    turns: Collection[int] | None
    rounded: bool


def nemo_gym_line(row: RolloutRow) -> Line:
    """The line of one of the rows that ``token_text.rows`` gives."""
    texts: list[Text] = []

    def placeholder(text: Text) -> str:
        texts.append(text)
        return _PLACE.format(len(texts) - 1)

    nemo_row, placed, rounded, plain = _nemo_gym_row(row, placeholder)
    first, *rest = _PLACED.split(orjson.dumps(nemo_row) if plain else _JSON.encode(nemo_row).encode())
    if rest[::2] != [b"%d" % n for n in range(len(texts))]:
        # A text of the row looks like a placeholder, or its items were moved: the row is written from its values.
        return Line(_JSON.encode(_nemo_gym_row(row, numbers)[0]).encode() + b"\n", placed, rounded)
    pieces: list[Text] = [first]
    for text, after in zip(texts, rest[1::2], strict=True):
        pieces += (b"[", text, b"]", after)
    pieces.append(b"\n")
    return Line(b"".join(pieces), placed, rounded)


def _nemo_gym_row(row: RolloutRow, lists: Lists) -> tuple[JsonObject, Collection[int] | None, bool, bool]:
    """The row, its turns that have a place (None: all), whether it was rounded, and whether orjson can write it."""
    origin = kept_rows(row)
    if origin is None:
        return *_from_columns(row, lists), False, False
    fields, rest, plain = origin
    rounded = any(ROUNDED in letters for *_, letters in fields["turns"])
    response, turns = fields["response"], row["turns"]
    for number, (*path, index, letters) in enumerate(fields["turns"]):
        items = response["output"]
        for step in path:
            items = items[step]
        kinds = {PROMPT: ("p", turns.prompts), GENERATION: ("g", turns.generations), LOG_PROBS: ("l", turns.log_probs)}
        items[index] |= {key: lists(texts[number]) for key, (letter, texts) in kinds.items() if letter in letters}
    values = {**rest, "response": response}
    # A row that its writer masked keeps its number.
    reward = fields[UNSCORED].get("reward") if row["reward"] is None else row["reward"]
    if "reward" in fields["keys"] or reward is not None:
        values["reward"] = fields["reward"] if "reward" in fields and _same(fields["reward"], reward) else reward
    # A later score comes last.
    names = [*fields["keys"], *(["reward"] if "reward" not in fields["keys"] else [])]
    return {key: values[key] for key in names if key in values}, None, rounded, plain and math.isfinite(reward or 0)


def _same(raw: Any, reward: float | None) -> bool:
    number = reward_of(raw)
    return number == reward or (number != number and reward != reward)


def _from_columns(row: RolloutRow, lists: Lists) -> tuple[JsonObject, Collection[int]]:
    messages, turns = with_call_ids(row["messages"]()), row["turns"]
    of_turns = (i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("turn") is not None)
    first = next(of_turns, None)
    if first is None:
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    output: list[JsonObject] = []
    placed: set[int] = set()
    for turn, item in items_of(messages[first:], first):
        if turn is not None and 0 <= turn < len(turns) and turn not in placed:
            placed.add(turn)
            item |= {PROMPT: lists(turns.prompts[turn]), GENERATION: lists(turns.generations[turn])}
            item |= {RENDERED: True} if turns.rendered[turn] else {LOG_PROBS: lists(turns.log_probs[turn])}
        output.append(item)
    task = object_of(loads(row["task"]))
    tools = loads(row["tools"])
    params = {
        **object_of(task.get("responses_create_params")),
        "input": [item for _, item in items_of(messages[:first])],
        "tools": [
            {"parameters": {}, "strict": False, **{k: tool[k] for k in _FUNCTION if k in tool}}
            if isinstance(tool, dict) and tool.get("type") == "function"
            else tool
            for tool in response_tools(tools)
        ],
        "temperature": shortest(row["temperature"]),
    }
    truncated = row["status"] == "truncated"
    response = {
        "id": f"resp_{row['rollout_id']}",
        "created_at": row["started_at"],
        "model": row["policy"],
        "object": "response",
        "output": output,
        # NeMo Gym's own model of a response needs these three.
        "tools": params["tools"],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated and row["stop_reason"] in _CUT else None,
    }
    # Fields that an imported and then repaired row kept besides these.
    beside = {k: v for k, v in task.items() if k not in ("responses_create_params", "response", "reward", "gymdata")}
    extra = object_of(loads(row["extra"]))
    reward = object_of(extra.pop(UNSCORED, None)).get("reward") if row["reward"] is None else row["reward"]
    nemo_row: JsonObject = {"responses_create_params": params, "response": response, "reward": reward} | beside
    # Fields of a resource server's /verify besides the reward.
    environment = object_of(extra.get("environment"))
    nemo_row |= {k: v for k, v in environment.items() if k not in nemo_row}
    nemo_row |= {"rollout_id": row["rollout_id"], "task_id": row["task_id"], "group_id": row["group_id"]}
    nemo_row["gymdata"] = {name: row[name] for name in _OWN} | {"tools": tools}
    extra = {name: value for name, value in extra.items() if name != "environment"}
    hidden = {k: v for k, v in task.items() if k in nemo_row and k != "responses_create_params" and nemo_row[k] != v}
    nemo_row["gymdata"] |= {k: v for k, v in (("extra", extra), ("task", hidden)) if v}
    return nemo_row, placed
