"""Rollouts as ATIF 1.7 trajectories: a step for each message that is no tool's answer, observations on the step before.

``metrics`` of an agent's step have ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs``; the reward, for which
ATIF has no field, is ``extra.reward``.

Invariants: reading what is written gives the messages, turns and columns back; ``logprobs`` are finite, as ATIF has
them, or they are in ``extra``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymdata.interop.trajectories.own import (
    OWN,
    SPELLINGS,
    facts_beyond,
    kept_of,
    list_of,
    own_columns,
    shortest,
    turn_facts,
)
from gymdata.rollouts.responses import loads
from gymdata.rollouts.turns import prompts_of

NAME = "atif"
VERSION = "ATIF-v1.7"
EMPTY = "rollouts without messages (left out: a trajectory has a step or more)"
NO_MESSAGE = "turns that no message names"
ROLES = "messages in roles that ATIF lacks, with no agent's step before them (now user's steps)"
ODD_CALLS = "tool calls whose arguments are no object (they are in extra)"
_ANSWERS = frozenset({"tool", "function", "environment"})
LISTS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def trajectory_of(row: Mapping[str, Any], lost: Counter[str]) -> dict[str, Any] | None:
    """The trajectory of a rollouts row (as the store spreads it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    prompts = prompts_of(row)
    kept = kept_of(row, NAME)
    if kept is not None:
        return _restored(row, prompts, kept)
    if not row["messages"]:
        lost[EMPTY] += 1
        return None
    return made_trajectory(row, prompts, lost)


def made_trajectory(row: Mapping[str, Any], prompts: Sequence[Any], lost: Counter[str]) -> dict[str, Any]:
    """The trajectory that the columns give."""
    from gymdata.interop.trajectories.atif_read import read_result, read_step

    steps: list[dict[str, Any]] = []
    placed: set[int] = set()
    for message in row["messages"]:
        if message["role"] in _ANSWERS and steps and steps[-1]["source"] == "agent":
            result = _result(message, steps[-1])
            _note(result, facts_beyond(message, read_result(result)))
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        step = _step(len(steps) + 1, message, lost)
        mine: dict[str, Any] = {}
        turn = message.get("turn")
        if step["source"] == "agent":
            step["model_name"] = row["policy"]
            if turn is not None and 0 <= turn < len(prompts) and turn not in placed:
                placed.add(turn)
                step["metrics"] = metrics_of(row["turns"][turn], prompts[turn])
                step["llm_call_count"] = 1
                mine["evidence"] = turn_facts(row["turns"][turn])
                if "logprobs" not in step["metrics"]:
                    mine["evidence"]["log_probs"] = _words(row["turns"][turn])
        _note(step, mine | facts_beyond(message, read_step(step)))
        steps.append(step)
    lost[NO_MESSAGE] += len(placed) < len(prompts)
    own = own_columns(row)
    steps[0]["timestamp"] = own["started_at"]
    return _root(row, own, steps)


def _root(row: Mapping[str, Any], own: Mapping[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    import gymdata

    agent = {"name": "gymdata", "version": gymdata.__version__, "model_name": row["policy"]}
    tools = loads(row["tools"])
    if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools):
        agent["tool_definitions"] = tools
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals = {f"total_{key}": sum(m[key] for m in metrics) for key in ("prompt_tokens", "completion_tokens")}
    reward = {"reward": row["reward"]} if row["reward"] is not None and math.isfinite(row["reward"]) else {}
    return {
        "schema_version": VERSION,
        "session_id": row["rollout_id"],
        "trajectory_id": row["rollout_id"],
        "agent": agent,
        "steps": steps,
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": {**reward, OWN: dict(own)},
    }


def metrics_of(turn: Mapping[str, Any], prompt: Any, spell: Callable[[Any], float] = shortest) -> dict[str, Any]:
    """A model call as ``metrics``; without ``logprobs`` when some are not finite. ``spell``: how a float32 is written."""
    generation = list_of(turn["generation_token_ids"])
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(generation),
        "prompt_token_ids": prompt.tolist(),
        "completion_token_ids": generation,
    }
    values = [spell(value) for value in list_of(turn["generation_log_probs"])]
    return metrics | ({"logprobs": values} if all(map(math.isfinite, values)) else {})


def _words(turn: Mapping[str, Any]) -> list[float | str]:
    """Log-probabilities with words for those that JSON has no number for."""
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    values = [shortest(value) for value in list_of(turn["generation_log_probs"])]
    return [v if math.isfinite(v) else words.get(v, "NaN") for v in values]


def _step(number: int, message: Mapping[str, Any], lost: Counter[str]) -> dict[str, Any]:
    role = message["role"]
    source = {"system": "system", "assistant": "agent"}.get(role, "user")
    lost[ROLES] += source == "user" and role != "user"
    step: dict[str, Any] = {"step_id": number, "source": source, "message": message["content"] or ""}
    if source == "agent":
        if message.get("reasoning") is not None:
            step["reasoning_content"] = message["reasoning"]
        calls = loads(message.get("tool_calls"))
        made = [_written_call(call, k, lost) for k, call in enumerate(calls)] if isinstance(calls, list) else []
        if made:
            step["tool_calls"] = made
    return step


def _written_call(call: Any, number: int, lost: Counter[str]) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    inner = call.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else {}
    arguments = function.get("arguments")
    lost[ODD_CALLS] += not isinstance(arguments, dict)
    return {
        "tool_call_id": str(call.get("id") or f"call_{number}"),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }


def _result(message: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    named = {"source_call_id": message["tool_call_id"]} if message.get("tool_call_id") in known else {}
    return named | {"content": message["content"] or ""}


def _note(place: dict[str, Any], facts: Mapping[str, Any]) -> None:
    if facts:
        place["extra"] = {OWN: dict(facts)}


def _restored(row: Mapping[str, Any], prompts: Sequence[Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = kept["source"]
    for turn, prompt, (path, taken) in zip(row["turns"], prompts, kept["turns"], strict=True):
        at: Any = source
        for step in path:
            at = at[step]
        names, spelling = taken
        lists = metrics_of(turn, prompt, SPELLINGS.get(spelling, shortest))
        # In the places that they had: a null stands there.
        at["metrics"] |= {name: lists[name] for name in names}
    extra = source.get("extra")
    given = extra.get("reward") if isinstance(extra, dict) else None
    if row["reward"] is not None and given != row["reward"]:
        source["extra"] = {**(extra if isinstance(extra, dict) else {}), "reward": row["reward"]}
    return source
