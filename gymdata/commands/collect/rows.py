"""A finished rollout as a row of the rollouts table, and a failed one as a line of failures.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from gymdata.commands.collect.episode import Rollout, turns_as_json
from gymdata.rewards.port import RewardPart
from gymdata.rewards.scheduler import total
from gymdata.rollouts.messages import Message, RolloutRow

_COLUMNS = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")
_ROLES = frozenset({"system", "user", "assistant", "tool", "function", "environment"})


def rollout_row(rollout: Rollout, parts: Sequence[RewardPart], faults: Mapping[str, str]) -> RolloutRow:
    """The table's row. ``faults``: reward functions that failed, by name; then the total is null."""
    assert rollout.outcome is not None
    key, encoder, verdict = rollout.setting.key, rollout.encoder, rollout.verdict
    extra: dict[str, object] = {"reward_faults": dict(faults)} if faults else {}
    if rollout.cut:
        extra["ids_behind_stop"] = rollout.cut
    if verdict is not None and verdict.extra:
        extra["environment"] = dict(verdict.extra)
    masked = verdict.masked if verdict is not None else {}
    extra |= masked
    return {
        "rollout_id": rollout.rollout_id,
        "run_id": key.run_id,
        "task_id": rollout.task.task_id,
        "group_id": key.group_id(rollout.task),
        "rollout_index": rollout.index,
        "policy": key.policy,
        "policy_hash": key.policy_hash,
        "policy_version": key.policy_version,
        "status": rollout.outcome.status,
        "stop_reason": rollout.outcome.stop_reason,
        "finish_reason": rollout.finish_reason,
        "reward": None if faults or masked else total(parts),
        "rewards": [{"name": part.name, "value": part.value} for part in parts if not masked],
        "temperature": rollout.setting.temperature,
        **encoder.columns(),
        "messages": [
            table_message(message, turn) for message, turn in zip(rollout.messages, rollout.produced_by, strict=True)
        ],
        "tools": to_json(rollout.tools or []),
        "task": to_json(rollout.task.row),
        "extra": to_json(extra),
        "started_at": rollout.started_at,
        "duration_s": rollout.duration_s,
    }


def failure_record(rollout: Rollout, attempt: int) -> dict[str, object]:
    """A failed attempt with everything that was sampled in it. ``counts``: whether it counts to ``--max-attempts``;
    ``final``: it used up all of them, because another would end in the same way."""
    fault = rollout.failure
    assert fault is not None
    return {
        "kind": fault.kind,
        "place": fault.phase,
        "message": fault.message,
        "attempt": attempt,
        "counts": not fault.fatal,
        "final": fault.final,
        **_who(rollout),
        "turns": turns_as_json(rollout.encoder.turns),
        "messages": [table_message(m, t) for m, t in zip(rollout.messages, rollout.produced_by, strict=True)],
        "duration_s": rollout.duration_s,
    }


def reward_fault_record(rollout: Rollout, name: str, message: str) -> dict[str, object]:
    """A reward function that failed on a rollout that was kept: nothing is pending for it."""
    return {
        "kind": "reward",
        "place": f"reward {name}",
        "message": message,
        "attempt": None,
        "counts": False,
        **_who(rollout),
        "turns": [],
        "messages": [],
        "duration_s": 0.0,
    }


def table_message(message: Message, turn: int | None) -> Message:
    """A chat message in the table's shape: tool calls as JSON text, unknown keys in ``extra``."""
    calls = message.get("tool_calls")
    extra = {k: v for k, v in message.items() if k not in _COLUMNS}
    role = message["role"]
    if role not in _ROLES:
        extra, role = {**extra, "role": role}, "other"
    return {
        "role": role,
        "content": message.get("content"),
        "reasoning": message.get("reasoning"),
        "tool_calls": to_json(calls) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "turn": turn,
        "extra": to_json(extra) if extra else None,
    }


def to_json(value: Any) -> str:
    """JSON text of anything that came out of JSON, lone surrogates and huge integers included."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    except TypeError:
        return json.dumps(value, default=str)


def _who(rollout: Rollout) -> dict[str, object]:
    return {
        "rollout_id": rollout.rollout_id,
        "run_id": rollout.setting.key.run_id,
        "group_id": rollout.setting.key.group_id(rollout.task),
        "task_id": rollout.task.task_id,
        "rollout_index": rollout.index,
        "at": datetime.now(UTC).isoformat(),
    }
