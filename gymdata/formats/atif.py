"""ATIF, the Agent Trajectory Interchange Format: 1.x as rows of the rollouts table, and rollouts as ATIF 1.7.

A step of a written trajectory is a message that is no tool's answer; observations are on the step before. ``metrics`` of an
agent's step have ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs``; the reward, for which ATIF has no field,
is ``extra.reward``, and the row is in ``extra``.

Invariants: a step is a turn when its ``metrics`` have the ids of prompt and completion, it was one model call, and
it is not context that was copied from another trajectory (``Importing.check_ids``): ids of several calls are not those of
one. Steps of embedded subagents are turns of their agent, without a message in the conversation, and turns that no message
names are written as such. Reading what is written gives the row back; ``logprobs`` are finite, as ATIF has them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

import gymdata
from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, CallIds, Importing, has_content
from gymdata.formats.conversion.models import (
    Int32,
    Model,
    OrEmpty,
    Several,
    log_probs_of,
    model_call,
    read,
    rest_of,
    take_own_row,
    with_own_row,
)
from gymdata.formats.conversion.rows import KINDS, foreign_row, message_of
from gymdata.formats.text.words import score
from gymdata.rollouts.messages import NOT_TEXT, JsonObject, Message, RolloutRow, json_text, loads, object_of, text_of
from gymdata.rollouts.turns import Ids, Turn, TurnEncoder, prompts_of

if TYPE_CHECKING:
    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.stage_output import Part

VERSION = "ATIF-v1.7"
EMPTY = "rollouts without messages (left out: a trajectory has a step or more)"
ROLES = "messages in roles that ATIF lacks, with no agent's step before them (now user's steps)"
ODD_CALLS = "tool calls whose arguments are no object (they are in extra)"
_ANSWERS = frozenset({"tool", "function", "environment"})


def _text(value: Any) -> Any:
    """A text, or that of its parts; a part that is no text was in the ids of a prompt, and is in no training here."""
    if not isinstance(value, list):
        return value
    for kind in (str(object_of(part).get("type")) for part in value):
        if any(word in kind for word in NOT_TEXT):
            raise PydanticCustomError("not_text", "text alone: images, audio and video are not trained")
    return text_of(value)


Text = Annotated[str | None, BeforeValidator(_text)]


class Reference(Model):
    trajectory_id: str | None = None


class Result(Model):
    source_call_id: str | None = None
    content: Text = None
    subagent_trajectory_ref: Several[Reference]


class Observation(Model):
    results: Several[Result]


class ToolCall(Model):
    tool_call_id: str | None = None
    function_name: str
    arguments: JsonObject


class Metrics(Model):
    prompt_token_ids: Several[Int32]
    completion_token_ids: Several[Int32]
    logprobs: list[float] | None = None


class Step(Model):
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: Text = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Several[ToolCall]
    observation: OrEmpty[Observation]
    metrics: OrEmpty[Metrics]
    is_copied_context: bool | None = None
    llm_call_count: int | None = None

    def table_message(self) -> Message:
        role = "assistant" if self.source == "agent" else self.source
        calls = [
            {"id": c.tool_call_id, "type": "function", "function": {"name": c.function_name, "arguments": c.arguments}}
            for c in self.tool_calls
        ]
        tool_calls = json_text(calls) if calls else None
        return message_of(role, self.message, reasoning=self.reasoning_content, tool_calls=tool_calls)

    def has_ids(self) -> bool | None:
        """Whether it has all ids of one model call; None where it has none."""
        has = bool(self.metrics.prompt_token_ids), bool(self.metrics.completion_token_ids)
        return has[0] == has[1] if any(has) and (self.llm_call_count in (None, 1) or not all(has)) else None

    @property
    def is_sampled(self) -> bool:
        """Whether a model wrote it here."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0


class Agent(Model):
    name: str | None = None
    model_name: str | None = None
    tool_definitions: Several[JsonObject]


class Subagent(Model):
    """A trajectory in another one."""

    trajectory_id: str | None = None
    agent: OrEmpty[Agent]
    steps: list[Step] = Field(min_length=1)
    subagent_trajectories: Several[Subagent]

    def tell(self, messages: list[Message], encoder: TurnEncoder, agent: str | None = None, where: str = "") -> None:
        """Add the messages and the model calls, which ``agent`` made. ``where``: before the names of its fields in an error.
        Raises BadItem."""
        waiting = dict(enumerate(self.subagent_trajectories))
        for number, step in enumerate(self.steps):
            message = step.table_message()
            if step.is_sampled and step.has_ids():
                message["turn"] = len(encoder.turns)
                metrics, path = step.metrics, f"{where}steps[{number}].metrics.logprobs"
                ids = metrics.prompt_token_ids, metrics.completion_token_ids
                encoder.add(model_call(*ids, metrics.logprobs, path, agent=agent))
            results = step.observation.results
            answers = (message_of("tool", r.content, tool_call_id=r.source_call_id) for r in results)
            messages += [message, *answers]
            names = {ref.trajectory_id for result in results for ref in result.subagent_trajectory_ref} - {None}
            for n in [n for n, inner in waiting.items() if inner.trajectory_id in names]:
                self._tell_inner(n, waiting.pop(n), encoder, where)
        for n, inner in waiting.items():
            self._tell_inner(n, inner, encoder, where)

    def _tell_inner(self, number: int, inner: Subagent, encoder: TurnEncoder, where: str) -> None:
        """Add its model calls; its messages are not of the conversation."""
        name = "subagent" if inner.agent.name is None else inner.agent.name
        inner.tell([], encoder, name, f"{where}subagent_trajectories[{number}].")

    def check_ids(self, importing: Importing, is_own: bool, where: str = "") -> None:
        """Raises BadItem as ``Importing.check_ids``, and for ids on a step that no agent has."""
        calls = []
        for number, step in enumerate(self.steps):
            place = f"{where}steps[{number}]"
            if step.source != "agent" and step.has_ids() is not None:
                raise BadItem("S102", f"{place}.source: got {step.source!r} with token ids, expected 'agent'")
            if step.is_sampled:
                missing = f"{place}.metrics: expected prompt_token_ids and completion_token_ids of one model call"
                calls.append(CallIds(step.has_ids(), missing, has_content(step.table_message())))
        importing.check_ids(calls, "steps", is_own=is_own)
        for n, inner in enumerate(self.subagent_trajectories):
            inner.check_ids(importing, is_own, f"{where}subagent_trajectories[{n}].")


class Trajectory(Subagent):
    schema_version: str = Field(pattern=r"^ATIF-v1\.\d+$")
    extra: OrEmpty[JsonObject]


@FORMATS.register("atif")
class Atif(Format):
    """ATIF trajectories, 1.x: a trajectory per line, or one or a list of them in a ``.json`` file."""

    content = "ATIF trajectories"
    suffixes = (".jsonl", ".json")
    holds_ids = holds_logprobs = holds_reward = True
    carries = KINDS["rollouts"]

    def recognise(self, value: Any) -> bool:
        if isinstance(value, list):
            return any(map(self.recognise, value[:20]))
        return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-")

    def row(self, item: Any, importing: Importing) -> RolloutRow:
        own = take_own_row(item, "extra", "rollouts")
        if own is not None and own.is_whole:
            return own.row
        trajectory = read(Trajectory, item)
        trajectory.check_ids(importing, own is not None)
        messages, encoder = list[Message](), TurnEncoder()
        trajectory.tell(messages, encoder)
        agent, steps = trajectory.agent, trajectory.steps
        names = (agent.model_name, *(step.model_name for step in steps), agent.name)
        times = [when for step in steps if (when := _time(step.timestamp)) is not None]
        row = foreign_row(
            item,
            messages,
            importing,
            turns=encoder,
            policy=next(filter(None, names), "unknown"),
            reward=score(trajectory.extra.get("reward"), "extra.reward"),
            tools=json_text(agent.tool_definitions),
            started_at=times[0].isoformat() if times else None,
            duration_s=max(0.0, (max(times) - times[0]).total_seconds()) if times else 0.0,
        )
        row |= {"extra": rest_of(item, "steps", "subagent_trajectories")}
        return row if own is None else own.edited(row)

    def trajectory(self, row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
        """The trajectory of a rollouts row (as ``to_rows`` gives it); None when it has no place in the format. Raises
        DataError when the turns were changed after collection."""
        if not row["messages"]:
            lost[EMPTY] += 1
            return None
        turns = dict(enumerate(zip(row["turns"], prompts_of(row), strict=True)))
        steps = _steps(row, turns, lost)
        steps[0]["timestamp"] = row["started_at"].isoformat()
        tools = loads(row["tools"])
        has_tools = isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools)
        metrics = [step["metrics"] for step in steps if "metrics" in step]
        totals = {f"total_{key}": sum(m[key] for m in metrics) for key in ("prompt_tokens", "completion_tokens")}
        has_number = row["reward"] is not None and math.isfinite(row["reward"])
        trajectory = {
            "schema_version": VERSION,
            "session_id": row["rollout_id"],
            "trajectory_id": row["rollout_id"],
            "agent": _agent("gymdata", row) | ({"tool_definitions": tools} if has_tools else {}),
            "steps": steps,
            "final_metrics": {**totals, "total_steps": len(steps)},
            "extra": {"reward": row["reward"]} if has_number else {},
        }
        # Turns that no message names: branches, retries and other agents' calls.
        of_agents: dict[str, list[JsonObject]] = {}
        for turn, prompt in turns.values():
            inner = of_agents.setdefault(turn.get("agent") or "gymdata", [])
            step = {"step_id": len(inner) + 1, "source": "agent", "message": ""}
            inner.append(step | {"metrics": _metrics(turn, prompt), "llm_call_count": 1})
        if of_agents:
            about = ((f"{row['rollout_id']}/{n}", name) for n, name in enumerate(of_agents))
            trajectory["subagent_trajectories"] = [
                {"schema_version": VERSION, "trajectory_id": i, "agent": _agent(name, row), "steps": of_agents[name]}
                for i, name in about
            ]
        return with_own_row(trajectory, "extra", row)

    def write(self, row: RolloutRow, lost: Counter[str]) -> bytes | None:
        trajectory = self.trajectory(row, lost)
        return None if trajectory is None else json_text(trajectory).encode() + b"\n"

    def save(self, converted: Iterable[bytes], part: Part, export: Export) -> None:
        """One trajectory is a ``.json`` document itself, several are a list."""
        super().save(converted, part, export)
        if part.name.endswith(".json"):
            text = part.path.read_bytes().rstrip(b"\n")
            part.path.write_bytes(text if export.written < 2 else b"[" + text.replace(b"\n", b",\n") + b"]\n")


def _time(text: str | None) -> datetime | None:
    """A timestamp with its zone; without one it is UTC."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _agent(name: str, row: RolloutRow) -> JsonObject:
    return {"name": name, "version": gymdata.__version__, "model_name": row["policy"]}


def _steps(row: RolloutRow, turns: dict[int, tuple[Turn, Ids]], lost: Counter[str]) -> list[JsonObject]:
    """The steps of the messages, whose turns are taken out of ``turns``."""
    steps: list[JsonObject] = []
    for message in row["messages"]:
        role, content = message["role"], message["content"] or ""
        if role in _ANSWERS and steps and steps[-1]["source"] == "agent":
            named = message.get("tool_call_id")
            known = named in {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            answer = ({"source_call_id": named} if known and named is not None else {}) | {"content": content}
            steps[-1].setdefault("observation", {"results": []})["results"].append(answer)
            continue
        source = {"system": "system", "assistant": "agent"}.get(role, "user")
        lost[ROLES] += source == "user" and role != "user"
        step: JsonObject = {"step_id": len(steps) + 1, "source": source, "message": content}
        if source == "agent":
            calls = loads(message.get("tool_calls"))
            written = [_written_call(c, n, lost) for n, c in enumerate(calls)] if isinstance(calls, list) else None
            step |= {"model_name": row["policy"], "reasoning_content": message.get("reasoning"), "tool_calls": written}
            if (sampled := turns.pop(message.get("turn"), None)) is not None:
                step |= {"metrics": _metrics(*sampled), "llm_call_count": 1}
        steps.append({name: value for name, value in step.items() if value not in (None, [])})
    return steps


def _metrics(turn: Turn, prompt: Ids) -> JsonObject:
    """A turn's ids and log-probabilities."""
    generation, log_probs = list(map(int, turn["generation_token_ids"])), log_probs_of(turn)
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(generation)}
    ids = {"prompt_token_ids": prompt.tolist(), "completion_token_ids": generation}
    return {**counts, **ids, **({"logprobs": log_probs} if all(map(math.isfinite, log_probs)) else {})}


def _written_call(call: Any, number: int, lost: Counter[str]) -> JsonObject:
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
