"""ATIF trajectories: 1.x as rows of the rollouts table, and rollouts as ATIF 1.7.

A step of a written trajectory is a message that is no tool's answer; observations are on the step before. ``metrics`` of an
agent's step have ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs``; the reward, for which ATIF has no field,
is ``extra.reward``, and the row is in ``extra``.

Invariants: a step is a turn when its ``metrics`` have the ids of prompt and completion, it was one model call, and
it is not context that was copied from another trajectory; steps of embedded subagents are turns of their agent, without a
message in the conversation, and turns that no message names are written as such; a model's step whose ids would be context
of a later turn, because they are not known, makes its trajectory unusable. Reading what is written gives the row
back; ``logprobs`` are finite, as ATIF has them.
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

import gymdata
from gymdata.formats.conversion.importing import BadItem, Importing
from gymdata.formats.conversion.rows import foreign_row, message_of
from gymdata.formats.text.words import score
from gymdata.formats.trajectories.own import (
    Int32,
    Model,
    log_probs_of,
    model_call,
    read,
    rest_of,
    take_own_row,
    with_own_row,
)
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, json_text, loads, object_of, text_of
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import Call, Ids, Turn, TurnEncoder, prompts_of

VERSION = "ATIF-v1.7"
EMPTY = "rollouts without messages (left out: a trajectory has a step or more)"
ROLES = "messages in roles that ATIF lacks, with no agent's step before them (now user's steps)"
ODD_CALLS = "tool calls whose arguments are no object (they are in extra)"
#: By number, turns with their prompts.
_Turns = dict[int, tuple[Turn, Ids]]
_ANSWERS = frozenset({"tool", "function", "environment"})
#: A text, or its parts.
_Text = Annotated[str | None, BeforeValidator(lambda value: text_of(value) if isinstance(value, list) else value)]


class Reference(Model):
    trajectory_id: str | None = None


class Result(Model):
    source_call_id: str | None = None
    content: _Text = None
    subagent_trajectory_ref: list[Reference] | None = None


class Observation(Model):
    results: list[Result]


class ToolCall(Model):
    tool_call_id: str | None = None
    function_name: str
    arguments: JsonObject


class Metrics(Model):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[Int32] | None = None
    completion_token_ids: list[Int32] | None = None
    logprobs: list[float] | None = None

    @property
    def has_ids(self) -> set[bool]:
        """Whether there are ids of prompt and completion: both alike, or one list alone."""
        return {bool(self.prompt_token_ids), bool(self.completion_token_ids)}


class Step(Model):
    step_id: int = 0
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: _Text = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None

    def table_message(self) -> Message:
        role = "assistant" if self.source == "agent" else self.source
        calls = [
            {"id": c.tool_call_id, "type": "function", "function": {"name": c.function_name, "arguments": c.arguments}}
            for c in self.tool_calls or ()
        ]
        tool_calls = json_text(calls) if calls else None
        return message_of(role, self.message, reasoning=self.reasoning_content, tool_calls=tool_calls)

    @property
    def is_turn(self) -> bool:
        """Whether it was one model call of this trajectory, with the ids of its prompt and of its completion."""
        metrics = self.metrics
        return (
            self.is_sampled and self.llm_call_count in (None, 1) and metrics is not None and metrics.has_ids == {True}
        )

    @property
    def is_sampled(self) -> bool:
        """Whether a model wrote it here."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0

    def call(self, agent: str | None, where: str) -> Call | None:
        """The model call of ``agent``; None where it is no turn. Raises BadItem."""
        metrics = self.metrics
        if not self.is_turn or metrics is None:
            return None
        lists = metrics.prompt_token_ids or [], metrics.completion_token_ids or [], metrics.logprobs
        return model_call(*lists, f"{where}.metrics.logprobs", agent=agent)


class Agent(Model):
    name: str | None = None
    version: str | None = None
    model_name: str | None = None
    tool_definitions: list[JsonObject] | None = None


class Subagent(Model):
    """A trajectory in another one."""

    schema_version: str | None = None
    trajectory_id: str | None = None
    agent: Agent = Field(default_factory=Agent)
    steps: list[Step] = Field(min_length=1)
    subagent_trajectories: list[Subagent] | None = None

    def tell(
        self, messages: list[Message] | None, encoder: TurnEncoder, agent: str | None = None, where: str = ""
    ) -> None:
        """Add the messages and the model calls, which ``agent`` made. ``messages``: None for the calls alone; ``where``:
        before the names of its fields in an error. Raises BadItem."""
        waiting = dict(enumerate(self.subagent_trajectories or ()))
        for number, step in enumerate(self.steps):
            message = step.table_message()
            if (call := step.call(agent, f"{where}steps[{number}]")) is not None:
                message["turn"] = len(encoder.turns)
                encoder.add(call)
            results = step.observation.results if step.observation is not None else []
            if messages is not None:
                answers = (message_of("tool", r.content, tool_call_id=r.source_call_id) for r in results)
                messages += [message, *answers]
            names = {ref.trajectory_id for result in results for ref in result.subagent_trajectory_ref or ()} - {None}
            for n in [n for n, inner in waiting.items() if inner.trajectory_id in names]:
                waiting.pop(n).tell_calls(encoder, f"{where}subagent_trajectories[{n}].")
        for n, inner in waiting.items():
            inner.tell_calls(encoder, f"{where}subagent_trajectories[{n}].")

    def tell_calls(self, encoder: TurnEncoder, where: str) -> None:
        self.tell(None, encoder, "subagent" if self.agent.name is None else self.agent.name, where)

    def refuse_missing_ids(self, is_own: bool, where: str = "") -> None:
        """Raises BadItem for a step that has a part of its ids, and for one that a model wrote before the last turn and that
        is none: its tokens would be context. ``is_own``: gymdata wrote it, whose answers need not be turns."""
        turns = [number for number, step in enumerate(self.steps) if step.is_turn]
        for number, step in enumerate(self.steps) if turns else ():
            is_part = step.metrics is not None and len(step.metrics.has_ids) == 2
            if step.source != "agent" and step.metrics is not None and True in step.metrics.has_ids:
                raise BadItem(
                    "S102", f"{where}steps[{number}].source: got {step.source!r} with token ids, expected 'agent'"
                )
            if step.is_sampled and not step.is_turn and (is_part or (number < turns[-1] and not is_own)):
                expected = "prompt_token_ids and completion_token_ids of one model call"
                raise BadItem("T205", f"{where}steps[{number}].metrics: expected {expected}, as other steps have")
        for n, inner in enumerate(self.subagent_trajectories or ()):
            inner.refuse_missing_ids(is_own, f"{where}subagent_trajectories[{n}].")


class Trajectory(Subagent):
    schema_version: str = Field(pattern=r"^ATIF-v1\.\d+$")
    session_id: str | None = None
    final_metrics: JsonObject | None = None
    extra: JsonObject | None = None


def row_of(source: Any, importing: Importing) -> RolloutRow:
    """The rollouts row of a trajectory. Raises BadItem."""
    own = take_own_row(source, "extra", ROLLOUTS)
    if own is not None and own.is_whole:
        return own.row
    trajectory = read(Trajectory, source)
    trajectory.refuse_missing_ids(own is not None)
    messages, encoder = list[Message](), TurnEncoder()
    trajectory.tell(messages, encoder)
    agent, steps = trajectory.agent, trajectory.steps
    names = (agent.model_name, *(step.model_name for step in steps), agent.name)
    times = [when for step in steps if (when := _time(step.timestamp)) is not None]
    row = foreign_row(
        source,
        messages,
        importing,
        turns=encoder,
        policy=next(filter(None, names), "unknown"),
        reward=score((trajectory.extra or {}).get("reward"), "extra.reward"),
        tools=json_text(agent.tool_definitions or []),
        started_at=times[0].isoformat() if times else None,
        duration_s=max(0.0, (max(times) - times[0]).total_seconds()) if times else 0.0,
    )
    row |= {"extra": rest_of(source, "steps", "subagent_trajectories")}
    return row if own is None else own.edited(row)


def _time(text: str | None) -> datetime | None:
    """A timestamp with its zone; without one it is UTC."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def trajectory_of(row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
    """The trajectory of a rollouts row (as ``store.columns.to_rows`` gives it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    if not row["messages"]:
        lost[EMPTY] += 1
        return None
    turns = dict(enumerate(zip(row["turns"], prompts_of(row), strict=True)))
    steps = _steps(row, turns, lost)
    steps[0].timestamp = row["started_at"].isoformat()
    tools = loads(row["tools"])
    tools = tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else None
    metrics = [step.metrics for step in steps if step.metrics is not None]
    totals = {f"total_{key}": sum(getattr(m, key) for m in metrics) for key in ("prompt_tokens", "completion_tokens")}
    has_number = row["reward"] is not None and math.isfinite(row["reward"])
    agent = {"name": "gymdata", "version": gymdata.__version__, "model_name": row["policy"]}
    trajectory = Trajectory(
        schema_version=VERSION,
        session_id=row["rollout_id"],
        trajectory_id=row["rollout_id"],
        agent=Agent.made(**agent, tool_definitions=tools or None),
        steps=steps,
        final_metrics={**totals, "total_steps": len(steps)},
        extra={"reward": row["reward"]} if has_number else {},
    )
    if turns:
        trajectory.subagent_trajectories = _subagents(row, turns)
    return with_own_row(trajectory.written(), "extra", row)


def _steps(row: RolloutRow, turns: _Turns, lost: Counter[str]) -> list[Step]:
    """The steps of the messages, whose turns are taken out of ``turns``."""
    steps: list[Step] = []
    for message in row["messages"]:
        role, content = message["role"], message["content"] or ""
        if role in _ANSWERS and steps and steps[-1].source == "agent":
            _observe(steps[-1], message)
            continue
        source = {"system": "system", "assistant": "agent"}.get(role, "user")
        lost[ROLES] += source == "user" and role != "user"
        fields: JsonObject = {"step_id": len(steps) + 1, "source": source, "message": content}
        if source == "agent":
            calls = loads(message.get("tool_calls"))
            calls = [_written_call(c, n, lost) for n, c in enumerate(calls)] if isinstance(calls, list) else []
            fields |= {"model_name": row["policy"], "reasoning_content": message.get("reasoning")}
            fields |= {"tool_calls": calls or None}
            if (sampled := turns.pop(message.get("turn"), None)) is not None:
                fields |= {"metrics": _metrics(*sampled), "llm_call_count": 1}
        steps.append(Step.made(**fields))
    return steps


def _subagents(row: RolloutRow, turns: _Turns) -> list[Subagent]:
    """A trajectory for each agent of turns that no message names: branches, retries and other agents' calls."""
    of_agents: dict[str, list[Step]] = {}
    for turn, prompt in turns.values():
        steps = of_agents.setdefault(turn.get("agent") or "gymdata", [])
        metrics = _metrics(turn, prompt)
        steps.append(Step(step_id=len(steps) + 1, source="agent", message="", metrics=metrics, llm_call_count=1))
    return [
        Subagent(
            schema_version=VERSION,
            trajectory_id=f"{row['rollout_id']}/{number}",
            agent=Agent(name=name, version=gymdata.__version__, model_name=row["policy"]),
            steps=steps,
        )
        for number, (name, steps) in enumerate(of_agents.items())
    ]


def _observe(step: Step, message: Message) -> None:
    """Add a tool's answer to the agent's step before it."""
    named = message.get("tool_call_id")
    known = named in {call.tool_call_id for call in step.tool_calls or ()}
    step.observation = step.observation or Observation(results=[])
    answer = Result.made(source_call_id=named if known else None, content=message["content"] or "")
    step.observation.results.append(answer)


def _metrics(turn: Turn, prompt: Ids) -> Metrics:
    """A turn's ids and log-probabilities."""
    generation, log_probs = list(map(int, turn["generation_token_ids"])), log_probs_of(turn)
    return Metrics.made(
        prompt_tokens=len(prompt),
        completion_tokens=len(generation),
        prompt_token_ids=prompt.tolist(),
        completion_token_ids=generation,
        logprobs=log_probs if all(map(math.isfinite, log_probs)) else None,
    )


def _written_call(call: Any, number: int, lost: Counter[str]) -> ToolCall:
    call = object_of(call)
    function = object_of(call.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # the interface of OpenAI has them as text
        arguments = loads(arguments)
    lost[ODD_CALLS] += not isinstance(arguments, dict)
    return ToolCall(
        tool_call_id=str(call.get("id") or f"call_{number}"),
        function_name=str(function.get("name") or ""),
        arguments=object_of(arguments),
    )
