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
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gymdata.formats.conversion.importing import Importing
from gymdata.formats.conversion.rows import foreign_row, message_of
from gymdata.formats.text.words import score
from gymdata.formats.trajectories.own import (
    Columns,
    Conversation,
    Entry,
    Evidence,
    Facts,
    Free,
    Int32,
    Model,
    list_of,
    log_probs_of,
    read,
)
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, json_text, loads, object_of, text_of
from gymdata.rollouts.turns import Call, Turn, prompts_of

VERSION = "ATIF-v1.7"
EMPTY = "rollouts without messages (left out: a trajectory has a step or more)"
ROLES = "messages in roles that ATIF lacks, with no agent's step before them (now user's steps)"
ODD_CALLS = "tool calls whose arguments are no object (they are in extra)"
_ANSWERS = frozenset({"tool", "function", "environment"})
#: A text, or its parts.
_Text = Annotated[str | None, BeforeValidator(lambda value: text_of(value) if isinstance(value, list) else value)]


class Reference(Model):
    trajectory_id: str | None = None


class Result(Entry):
    source_call_id: str | None = None
    content: _Text = None
    subagent_trajectory_ref: list[Reference] | None = None
    extra: Free | None = None

    def free(self) -> Free | None:
        return self.extra

    def plain_message(self) -> Message:
        return message_of("tool", self.content, tool_call_id=self.source_call_id)


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


class Step(Entry):
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
    extra: Free | None = None

    def free(self) -> Free | None:
        return self.extra

    def plain_message(self) -> Message:
        role = "assistant" if self.source == "agent" else self.source
        calls = [
            {"id": c.tool_call_id, "type": "function", "function": {"name": c.function_name, "arguments": c.arguments}}
            for c in self.tool_calls or ()
        ]
        tool_calls = json_text(calls) if calls else None
        return message_of(role, self.message, reasoning=self.reasoning_content, tool_calls=tool_calls)

    def call(self, agent: str | None) -> Call | None:
        """The model call; None where it was none, several, or one of another trajectory, or its ids are missing. ``agent``:
        whose it is otherwise."""
        metrics, known = self.metrics, self.facts().evidence
        if self.source != "agent" or metrics is None or self.is_copied_context or self.llm_call_count not in (None, 1):
            return None
        prompt, generation = metrics.prompt_token_ids, metrics.completion_token_ids
        if not prompt or generation is None or not (generation or known):
            return None
        evidence = known or Evidence(agent=agent)
        return evidence.call(prompt, generation, evidence.log_probs or metrics.logprobs)


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

    def tell(self, conversation: Conversation, agent: str | None = None, *, aside: bool = False) -> None:
        """Add the messages and calls to ``conversation``. ``agent``: whose calls they are; ``aside``: without messages."""
        waiting = dict(enumerate(self.subagent_trajectories or ()))
        for step in self.steps:
            conversation.add(step, step.call(agent), aside=aside)
            for result in step.observation.results if step.observation is not None else ():
                conversation.add(result, aside=aside)
                for named in result.subagent_trajectory_ref or ():
                    called = (
                        k for k, inner in waiting.items() if inner.trajectory_id == named.trajectory_id is not None
                    )
                    if (key := next(called, None)) is not None:
                        waiting.pop(key).tell_aside(conversation)
        for inner in waiting.values():
            inner.tell_aside(conversation)

    def tell_aside(self, conversation: Conversation) -> None:
        self.tell(conversation, "subagent" if self.agent.name is None else self.agent.name, aside=True)


class TrajectoryExtra(Model):
    reward: Any = None
    gymdata: Columns | None = None


class Trajectory(Subagent):
    schema_version: str = Field(pattern=r"^ATIF-v1\.\d+$")
    session_id: str | None = None
    final_metrics: JsonObject | None = None
    extra: TrajectoryExtra | None = None


def row_of(source: Any, importing: Importing) -> RolloutRow:
    """The rollouts row of a trajectory. Raises BadItem."""
    trajectory = read(Trajectory, source)
    conversation = Conversation()
    trajectory.tell(conversation)
    extra = trajectory.extra or TrajectoryExtra()
    reward = score(extra.reward, "extra.reward")
    if (columns := extra.gymdata) is not None:
        own = columns.reward
        # A number that is not finite is in the columns alone.
        unsaid = reward is None and own is not None and not math.isfinite(own)
        return columns.row(own if unsaid else reward, conversation)
    agent, steps = trajectory.agent, trajectory.steps
    names = (agent.model_name, *(step.model_name for step in steps), agent.name)
    times = [when for step in steps if (when := _time(step.timestamp)) is not None]
    row = foreign_row(
        source,
        conversation.messages,
        importing,
        turns=conversation.turns(),
        policy=next(filter(None, names), "unknown"),
        reward=reward,
        tools=json_text(agent.tool_definitions or []),
        started_at=times[0].isoformat() if times else None,
        duration_s=max(0.0, (max(times) - times[0]).total_seconds()) if times else 0.0,
    )
    about = {key: value for key, value in source.items() if key not in ("steps", "subagent_trajectories")}
    return row | {"extra": json_text(about)}


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
    columns, prompts = Columns.of(row), prompts_of(row)
    steps, subagents = _steps(row, prompts, lost)
    steps[0].timestamp = columns.started_at
    tools = loads(row["tools"])
    tools = tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else None
    metrics = [step.metrics for step in steps if step.metrics is not None]
    totals = {f"total_{key}": sum(getattr(m, key) for m in metrics) for key in ("prompt_tokens", "completion_tokens")}
    reward = columns.reward if columns.reward is not None and math.isfinite(columns.reward) else None
    return Trajectory.made(
        schema_version=VERSION,
        session_id=row["rollout_id"],
        trajectory_id=row["rollout_id"],
        agent=_agent("gymdata", row, tools or None),
        steps=steps,
        final_metrics={**totals, "total_steps": len(steps)},
        extra=TrajectoryExtra.made(reward=reward, gymdata=columns),
        subagent_trajectories=subagents or None,
    ).written()


def _agent(name: str, row: RolloutRow, tools: list[JsonObject] | None = None) -> Agent:
    import gymdata

    return Agent.made(name=name, version=gymdata.__version__, model_name=row["policy"], tool_definitions=tools)


def _steps(row: RolloutRow, prompts: Sequence[Any], lost: Counter[str]) -> tuple[list[Step], list[Subagent]]:
    """The steps of the messages; and a trajectory for each agent of the turns that no message names: branches, retries and
    other agents' calls."""
    steps: list[Step] = []
    left = dict(enumerate(row["turns"]))
    for message in row["messages"]:
        role, content = message["role"], message["content"] or ""
        if role in _ANSWERS and steps and steps[-1].source == "agent":
            _observe(steps[-1], message)
            continue
        source = {"system": "system", "assistant": "agent"}.get(role, "user")
        lost[ROLES] += source == "user" and role != "user"
        if source != "agent":
            step, evidence = Step.made(step_id=len(steps) + 1, source=source, message=content), None
        else:
            calls = loads(message.get("tool_calls"))
            calls = [_written_call(c, n, lost) for n, c in enumerate(calls)] if isinstance(calls, list) else []
            number = message.get("turn")
            measured, evidence = _measured(left.pop(number), prompts[number]) if number in left else ({}, None)
            step = Step.made(
                step_id=len(steps) + 1,
                source=source,
                message=content,
                model_name=row["policy"],
                reasoning_content=message.get("reasoning"),
                tool_calls=calls or None,
                **measured,
            )
        if (facts := step.beyond(message, evidence)) is not None:
            step.extra = Free(gymdata=facts)
        steps.append(step)
    aside: dict[str | None, list[Step]] = {}
    for number, turn in left.items():
        measured, evidence = _measured(turn, prompts[number])
        made = aside.setdefault(turn.get("agent"), [])
        extra = Free(gymdata=Facts(evidence=evidence, turn=number))
        made.append(Step(step_id=len(made) + 1, source="agent", message="", extra=extra, **measured))
    return steps, [
        Subagent(
            schema_version=VERSION,
            trajectory_id=f"{row['rollout_id']}/{number}",
            agent=_agent(name or "gymdata", row),
            steps=made,
        )
        for number, (name, made) in enumerate(aside.items())
    ]


def _observe(step: Step, message: Message) -> None:
    """Add a tool's answer to the agent's step before it."""
    named = message.get("tool_call_id")
    known = named in {call.tool_call_id for call in step.tool_calls or ()}
    result = Result.made(source_call_id=named if known else None, content=message["content"] or "")
    if (facts := result.beyond(message)) is not None:
        result.extra = Free(gymdata=facts)
    step.observation = step.observation or Observation(results=[])
    step.observation.results.append(result)


def _measured(turn: Turn, prompt: Any) -> tuple[JsonObject, Evidence]:
    """The fields of a step that are its model call, and what they have no place for."""
    generation, log_probs = list_of(turn["generation_token_ids"]), log_probs_of(turn)
    finite = all(map(math.isfinite, log_probs))
    metrics = Metrics.made(
        prompt_tokens=len(prompt),
        completion_tokens=len(generation),
        prompt_token_ids=prompt.tolist(),
        completion_token_ids=generation,
        logprobs=log_probs if finite else None,
    )
    return {"metrics": metrics, "llm_call_count": 1}, Evidence.of(turn, log_probs=None if finite else log_probs)


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
