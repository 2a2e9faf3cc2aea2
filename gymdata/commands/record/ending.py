"""How a session ends: as a client says with POST /rollouts/KEY/finish, or as its agent's run did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gymdata.commands.record.request import RequestError
from gymdata.rollouts.messages import RolloutRow, TaskRow

COMPLETED, TRUNCATED, FAILED = "completed", "truncated", "failed"
#: Stop reasons of sessions that used up a budget: they are truncated, whatever their client says.
BUDGETS = ("max_turns", "max_tokens_total")
#: A field that names nothing.
_NO_PARTS = "rewards", dict[str, float]()
#: The reward that a client reports, among the parts.
REPORTED = "reported"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ends, as POST /rollouts/KEY/finish says."""

    status: str = COMPLETED
    stop_reason: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    task: TaskRow | None = None
    task_id: str | None = None
    #: What the agent's run left for rewards, by their names of it, and its folder, which is not kept.
    left: Mapping[str, Any] = field(default_factory=dict)
    #: The fields of ``extra`` of a rollout that is not trained on, which no reward scores.
    masked: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    #: The fields of the request that say something, with numbers as they are stored.
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Any) -> Ending:
        """From the body of a request. Raises RequestError."""
        if not isinstance(body, dict):
            raise RequestError("invalid", "the body is not an object")
        allowed = ("status", "stop_reason", "reward", "rewards", "task", "task_id")
        for name in body.keys() - set(allowed):
            raise RequestError.field(name, f"expected one of {', '.join(allowed)}")
        fields = {name: value for name, value in body.items() if value not in (None, "") and (name, value) != _NO_PARTS}
        if (status := fields.get("status", COMPLETED)) not in (COMPLETED, TRUNCATED, FAILED):
            raise RequestError.field("status", f"got {status!r}, expected completed, truncated or failed")
        rewards = fields.get("rewards", {})
        if not isinstance(rewards, dict):
            raise RequestError.field("rewards", "expected an object of numbers by name")
        for name, value in [("reward", fields.get("reward", 0)), *rewards.items()]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise RequestError.field(name, f"got {value!r}, expected a finite number")
        if not isinstance(fields.get("task", {}), dict):
            raise RequestError.field("task", "expected an object")
        for name in ("task_id", "stop_reason"):
            if not isinstance(fields.get(name, ""), (str, int)):
                raise RequestError.field(name, "expected text")
        inside = fields.get("task", {}).get("task_id")
        inside = None if inside == "" else inside
        if inside is not None and str(fields.get("task_id", inside)) != str(inside):
            raise RequestError.field("task_id", f"got {fields['task_id']!r}, and {inside!r} in the task: give one")
        fields |= {name: str(fields[name]) for name in ("task_id", "stop_reason") if name in fields}
        if "reward" in fields:
            fields["reward"] = float(fields["reward"])
        if "rewards" in fields:
            fields["rewards"] = {name: float(value) for name, value in rewards.items()}
        return cls(**fields, fields=fields)

    def refuse_other(self, key: str, row: RolloutRow, *, scored: bool) -> None:
        """Raise RequestError when session ``key`` ended with other values than these: ``row`` is its rollout.
        ``scored``: the run has rewards of its own, which are among the row's parts."""
        parts = [(part["name"], part["value"]) for part in row["rewards"]]
        status = row["status"]
        if status == TRUNCATED and row["stop_reason"] in BUDGETS and self.status != FAILED:
            status = self.status
        reported = row["reward"]
        if scored:
            # The run's rewards decide; of what a client reports only parts are kept, or the total as one.
            reported = self.reward if self.rewards else dict(parts).get(REPORTED)
        rewards = dict(parts)
        if scored and all(part in parts for part in self.rewards.items()):
            rewards = dict(self.rewards)
        task = {"task_id": row["task_id"], **(self.task or {})}
        ended_with = {
            "status": status,
            "reward": reported,
            "rewards": rewards,
            "task": self.task if task == orjson.loads(row["task"]) else orjson.loads(row["task"]),
            "task_id": row["task_id"],
        }
        for name, value in ended_with.items():
            if name in self.fields and self.fields[name] != value:
                raise RequestError(
                    "invalid",
                    f"session {key} has ended with {name} {value!r:.200}, got {self.fields[name]!r:.200}: its rollout "
                    f"{row['rollout_id']} stays as it is",
                    where=name,
                    status=409,
                )
