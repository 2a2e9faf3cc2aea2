"""How a session ends: as a client says with POST /rollouts/KEY/finish, or as its agent's run did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from gymdata.commands.record.body import Body
from gymdata.commands.record.request import RequestError
from gymdata.rollouts.messages import JsonObject, TaskRow

COMPLETED, TRUNCATED, FAILED = "completed", "truncated", "failed"
#: The reward that a client reports, among the parts.
REPORTED = "reported"
_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
#: Clients number their tasks, too; an empty name is none.
_Name = Annotated[
    str | None, pydantic.BeforeValidator(lambda value: (str(value) if type(value) is int else value) or None)
]


class _Finish(Body):
    """The body of POST /rollouts/KEY/finish."""

    status: Literal["completed", "truncated", "failed"] = "completed"
    stop_reason: _Name = None
    reward: _Finite | None = None
    rewards: Annotated[dict[str, _Finite], pydantic.Field(default_factory=dict)]
    task: JsonObject | None = None
    task_id: _Name = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ends."""

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

    @classmethod
    def of(cls, body: JsonObject) -> Ending:
        """From the body of a request. Raises RequestError."""
        ending = cls(**dict(_Finish.of(body)))
        inside = (ending.task or {}).get("task_id")
        if ending.task_id is not None and inside not in (None, "") and str(inside) != ending.task_id:
            raise RequestError.field("task_id", f"got {ending.task_id!r}, and {inside!r} in the task: give one")
        return ending
