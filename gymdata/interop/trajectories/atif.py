"""ATIF trajectories: 1.x as rows of the rollouts table, and rollouts as ATIF 1.7.

A step of a written trajectory is a message that is no tool's answer; observations are on the step before. ``metrics`` of an
agent's step have ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs``; the reward, for which ATIF has no field,
is ``extra.reward``.

Invariants: a step is a turn when its ``metrics`` have the ids of prompt and completion, it was one model call, and
it is not context that was copied from another trajectory; steps of embedded subagents are turns of their agent, without a
message in the conversation, and turns without a message are written as such. Reading what is written gives the messages,
turns and columns back; ``logprobs`` are finite, as ATIF has them, or they are in ``extra``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from gymdata.errors import json_kind
from gymdata.interop.importing import BadItem, Importing
from gymdata.interop.rows import foreign_row, message_of, refuse_surrogates
from gymdata.interop.trajectories.own import (
    OWN,
    call_of,
    facts_beyond,
    from_own,
    id_of,
    ids_of,
    list_of,
    log_probs_of,
    own_columns,
    shortest,
    turn_facts,
    whole_row,
    with_facts,
)
from gymdata.interop.words import score
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, ToolCall, json_text, loads, object_of, text_of
from gymdata.rollouts.turns import Call, Turn, TurnEncoder, prompts_of
from gymdata.store.lines import name_non_finite

_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
_DEEPEST = 20


def row_of(source: Any, importing: Importing) -> RolloutRow:
    """The rollouts row of a trajectory. Raises BadItem."""
    if not isinstance(source, dict):
        raise BadItem("S102", f"got {json_kind(source)}, expected an ATIF trajectory")
    version = str(source.get("schema_version", ""))
    number = version.removeprefix("ATIF-v1.")
    if number == version or not number.isdigit():
        raise BadItem("S103", f"schema_version: got {version!r}, expected ATIF-v1.0 or a later 1.x")
    if not isinstance(source.get("steps"), list):
        raise BadItem("S103", "it has no list `steps`")
    if not source["steps"]:
        raise BadItem("S103", "steps: got an empty list, expected at least one step")
    refuse_surrogates(source)
    model_calls = _ModelCalls()
    messages = model_calls.trajectory(source, None, 0)
    encoder = model_calls.encoder()
    extra = object_of(source.get("extra"))
    columns = from_own(extra.get(OWN))
    reward = score(extra.get("reward"), "extra.reward")
    if columns is not None:
        own_reward = columns["reward"]
        unsaid = reward is None and not (type(own_reward) in (int, float) and own_reward - own_reward == 0)
        return whole_row(columns if unsaid else columns | {"reward": reward}, messages, encoder)
    agent = object_of(source.get("agent"))
    steps = [step for step in source["steps"] if isinstance(step, dict)]
    names = [agent.get("model_name"), *(step.get("model_name") for step in steps), agent.get("name")]
    times = [when for step in steps if (when := _time(step.get("timestamp"))) is not None]
    tools = agent.get("tool_definitions")
    row = foreign_row(
        source,
        messages,
        importing,
        turns=encoder,
        policy=next((name for name in names if isinstance(name, str) and name), "unknown"),
        reward=reward,
        tools=json_text(tools) if isinstance(tools, list) and tools else "[]",
        started_at=times[0].isoformat() if times else None,
        duration_s=max(0.0, (max(times) - times[0]).total_seconds()) if times else 0.0,
    )
    about = {key: value for key, value in source.items() if key not in ("steps", "subagent_trajectories")}
    return row | {"extra": json_text(about)}


def _time(text: Any) -> datetime | None:
    """A timestamp with its zone; without one it is UTC."""
    from datetime import UTC

    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


class _ModelCalls:
    """Model calls of a trajectory and its subagents, in the order in which they were made."""

    def __init__(self) -> None:
        #: Number among the turns where it is known, the call, and its message; None for a subagent's.
        self._calls: list[tuple[int | None, Call, dict[str, Any] | None]] = []

    def trajectory(self, source: JsonObject, agent: str | None, depth: int) -> list[JsonObject]:
        """The messages of ``source``; its calls are remembered. Raises BadItem naming the step."""
        if depth > _DEEPEST:
            raise BadItem("S102", "subagents nested too deeply")
        subagents = source.get("subagent_trajectories")
        waiting = dict(enumerate(subagents)) if isinstance(subagents, list) else {}
        waiting = {k: subagent for k, subagent in waiting.items() if isinstance(subagent, dict)}
        messages: list[Message] = []
        for index, step in enumerate(source["steps"] if isinstance(source.get("steps"), list) else ()):
            source_name = step.get("source") if isinstance(step, dict) else step
            if not isinstance(step, dict) or not isinstance(source_name, str) or source_name not in _SOURCES:
                names = ", ".join(_SOURCES)
                raise BadItem("S103", f"steps[{index}]: source: got {source_name!r:.60}, expected one of {names}")
            message = with_facts(read_step(step), _own(step))
            call = _call(step, agent, f"steps[{index}]")
            if call is not None:
                self._calls.append((message["turn"], call, message))
            messages.append(message)
            results = object_of(step.get("observation")).get("results")
            for result in [entry for entry in results if isinstance(entry, dict)] if isinstance(results, list) else []:
                messages.append(with_facts(read_result(result), _own(result)))
                for named in _references(result):
                    key = next((k for k, subagent in waiting.items() if subagent.get("trajectory_id") == named), None)
                    if key is not None:
                        self._subagent(waiting.pop(key), depth)
        for subagent in waiting.values():
            self._subagent(subagent, depth)
        return messages

    def _subagent(self, source: JsonObject, depth: int) -> None:
        name = object_of(source.get("agent")).get("name")
        before = len(self._calls)
        self.trajectory(source, name if isinstance(name, str) else "subagent", depth + 1)
        # A subagent's message does not belong to this conversation.
        self._calls[before:] = [(turn, call, None) for turn, call, _ in self._calls[before:]]

    def encoder(self) -> TurnEncoder:
        """The turns; messages get the number of theirs."""
        calls = self._calls
        if all(turn is not None for turn, *_ in calls):
            # Ours are numbered in the order in which they were called, which need not be that of the messages.
            calls = sorted(calls, key=lambda call: call[0] or 0)
            if len({turn for turn, *_ in calls}) < len(calls):
                raise BadItem("T208", "two steps are of one turn")
        encoder = TurnEncoder()
        for number, (_, call, message) in enumerate(calls):
            encoder.add(call)
            if message is not None:
                message["turn"] = number
        return encoder


def read_step(step: JsonObject) -> Message:
    """The message of a step, without ``extra.gymdata``, in which gymdata's own files have more."""
    more: JsonObject = {}
    if isinstance(step.get("reasoning_content"), str):
        more["reasoning"] = step["reasoning_content"]
    calls = step.get("tool_calls")
    if isinstance(calls, list) and calls:
        chat_calls = []
        for call in map(object_of, calls):
            function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
            chat_calls.append({"id": call.get("tool_call_id"), "type": "function", "function": function})
        more["tool_calls"] = json_text(chat_calls)
    return message_of(_SOURCES.get(step["source"], "other"), _text(step.get("message")), **more)


def read_result(result: JsonObject) -> dict[str, Any]:
    """The message that an observation's result is."""
    named = result.get("source_call_id")
    return message_of("tool", _text(result.get("content")), tool_call_id=named if isinstance(named, str) else None)


def _text(content: Any) -> str | None:
    return content if isinstance(content, str) or content is None else text_of(content)


def _own(entry: JsonObject) -> Any:
    return object_of(entry.get("extra")).get(OWN)


def _references(result: JsonObject) -> list[str]:
    refs = result.get("subagent_trajectory_ref")
    ids = [ref.get("trajectory_id") for ref in refs if isinstance(ref, dict)] if isinstance(refs, list) else []
    return [name for name in ids if isinstance(name, str)]


def _call(step: JsonObject, agent: str | None, where: str) -> Call | None:
    """The model call of a step; None where it was none, several, or one of another trajectory, or its ids are missing."""
    metrics = step.get("metrics")
    if step["source"] != "agent" or not isinstance(metrics, dict) or step.get("is_copied_context") is True:
        return None
    if step.get("llm_call_count") not in (None, 1):
        return None
    facts = object_of(object_of(_own(step)).get("evidence"))
    prompt = ids_of(metrics.get("prompt_token_ids"), f"{where}.metrics.prompt_token_ids")
    generation = ids_of(metrics.get("completion_token_ids"), f"{where}.metrics.completion_token_ids")
    if generation is None and facts and metrics.get("completion_token_ids") == []:
        generation = np.empty(0, np.int32)
    if prompt is None or generation is None:
        return None
    log_probs = log_probs_of(facts.get("log_probs", metrics.get("logprobs")), len(generation))
    top = _alternatives(facts.get("top_log_probs"), len(generation), where)
    return call_of(facts, prompt, generation, log_probs, top, agent)


def _alternatives(tops: Any, length: int, where: str) -> Any:
    if tops is None:
        return None
    name = f"{where}.extra.gymdata.evidence.top_log_probs"
    if not isinstance(tops, list) or len(tops) != length:
        actual = f"{len(tops)} lists" if isinstance(tops, list) else f"{tops!r:.60}"
        raise BadItem("S102", f"{name}: got {actual}, expected a list for each of {length} tokens")
    try:
        return [[{"id": id_of(top["id"]), "log_prob": shortest(top["log_prob"])} for top in token] for token in tops]
    except (TypeError, LookupError, ValueError, OverflowError):
        raise BadItem("S102", f"{name}: expected lists of id and log_prob") from None


VERSION = "ATIF-v1.7"
EMPTY = "rollouts without messages (left out: a trajectory has a step or more)"
ROLES = "messages in roles that ATIF lacks, with no agent's step before them (now user's steps)"
ODD_CALLS = "tool calls whose arguments are no object (they are in extra)"
_ANSWERS = frozenset({"tool", "function", "environment"})


def trajectory_of(row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
    """The trajectory of a rollouts row (as ``store.columns.to_rows`` gives it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    if not row["messages"]:
        lost[EMPTY] += 1
        return None
    return made_trajectory(row, prompts_of(row), lost)


def made_trajectory(row: RolloutRow, prompts: Sequence[Any], lost: Counter[str]) -> JsonObject:
    """The trajectory that the columns give."""
    steps: list[JsonObject] = []
    placed: set[int] = set()
    for message in row["messages"]:
        if message["role"] in _ANSWERS and steps and steps[-1]["source"] == "agent":
            call_ids = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            named = {"source_call_id": message["tool_call_id"]} if message.get("tool_call_id") in call_ids else {}
            result = named | {"content": message["content"] or ""}
            _note(result, facts_beyond(message, read_result(result)))
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        role = message["role"]
        source = {"system": "system", "assistant": "agent"}.get(role, "user")
        lost[ROLES] += source == "user" and role != "user"
        step: JsonObject = {"step_id": len(steps) + 1, "source": source, "message": message["content"] or ""}
        if source == "agent":
            if message.get("reasoning") is not None:
                step["reasoning_content"] = message["reasoning"]
            calls = loads(message.get("tool_calls"))
            tool_calls = [_written_call(c, k, lost) for k, c in enumerate(calls)] if isinstance(calls, list) else []
            if tool_calls:
                step["tool_calls"] = tool_calls
        facts: JsonObject = {}
        turn = message.get("turn")
        if step["source"] == "agent":
            step["model_name"] = row["policy"]
            if turn is not None and 0 <= turn < len(prompts) and turn not in placed:
                placed.add(turn)
                step["metrics"] = metrics_of(row["turns"][turn], prompts[turn])
                step["llm_call_count"] = 1
                facts["evidence"] = _evidence(row["turns"][turn])
        _note(step, facts | facts_beyond(message, read_step(step)))
        steps.append(step)
    columns = own_columns(row)
    steps[0]["timestamp"] = columns["started_at"]
    import gymdata

    agent = {"name": "gymdata", "version": gymdata.__version__, "model_name": row["policy"]}
    tools = loads(row["tools"])
    if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools):
        agent["tool_definitions"] = tools
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals = {f"total_{key}": sum(m[key] for m in metrics) for key in ("prompt_tokens", "completion_tokens")}
    reward = {"reward": row["reward"]} if row["reward"] is not None and math.isfinite(row["reward"]) else {}
    subagents = _subagents(row, prompts, agent, [number for number in range(len(prompts)) if number not in placed])
    return {
        "schema_version": VERSION,
        "session_id": row["rollout_id"],
        "trajectory_id": row["rollout_id"],
        "agent": agent,
        "steps": steps,
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": {**reward, OWN: dict(columns)},
        **({"subagent_trajectories": subagents} if subagents else {}),
    }


def _evidence(turn: Turn) -> JsonObject:
    """What the metrics of a turn have no place for; log-probabilities are there where some are not finite."""
    values = [shortest(value) for value in list_of(turn["generation_log_probs"])]
    unwritten = {} if all(map(math.isfinite, values)) else {"log_probs": name_non_finite(values)}
    return turn_facts(turn) | unwritten


def _subagents(row: RolloutRow, prompts: Sequence[Any], agent: JsonObject, turns: Sequence[int]) -> list[JsonObject]:
    """A trajectory for each agent of the turns that no message names: branches, retries and other agents' calls."""
    made: dict[str | None, JsonObject] = {}
    for number in turns:
        turn = row["turns"][number]
        name = turn.get("agent")
        if name not in made:
            about = {key: agent[key] for key in ("version", "model_name")}
            made[name] = {
                "schema_version": VERSION,
                "trajectory_id": f"{row['rollout_id']}/{len(made)}",
                "agent": {"name": name or "gymdata"} | about,
                "steps": [],
            }
        steps = made[name]["steps"]
        facts = {"evidence": {"agent": name} | _evidence(turn), "turn": number}
        step = {"step_id": len(steps) + 1, "source": "agent", "message": "", "llm_call_count": 1}
        steps.append(step | {"metrics": metrics_of(turn, prompts[number]), "extra": {OWN: facts}})
    return list(made.values())


def metrics_of(turn: Turn, prompt: Any) -> JsonObject:
    """A model call as ``metrics``; without ``logprobs`` when some are not finite."""
    generation = list_of(turn["generation_token_ids"])
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(generation),
        "prompt_token_ids": prompt.tolist(),
        "completion_token_ids": generation,
    }
    values = [shortest(value) for value in list_of(turn["generation_log_probs"])]
    return metrics | ({"logprobs": values} if all(map(math.isfinite, values)) else {})


def _written_call(call: Any, number: int, lost: Counter[str]) -> ToolCall:
    call = object_of(call)
    function = object_of(call.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # the interface of OpenAI has them as text
        arguments = loads(arguments)
    lost[ODD_CALLS] += not isinstance(arguments, dict)
    return {
        "tool_call_id": str(call.get("id") or f"call_{number}"),
        "function_name": str(function.get("name") or ""),
        "arguments": object_of(arguments),
    }


def _note(entry: JsonObject, facts: JsonObject) -> None:
    if facts:
        entry["extra"] = {OWN: dict(facts)}
