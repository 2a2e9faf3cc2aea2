"""The base of the models of published formats, and what gymdata's rollouts have beyond them: it is in their free objects,
under ``gymdata``.

Invariants: what is not as its model says is a BadItem with the path of its first fault; the ``Columns`` of a row give its
columns back; the facts of a message are exactly what reading its foreign form would get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import pydantic

from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.conversion.rows import refuse_surrogates
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, loads
from gymdata.rollouts.turns import Call, Turn, TurnEncoder
from gymdata.settings import expected_text
from gymdata.store.lines import NON_FINITE

#: What pydantic has other words for.
_EXPECTED = {"too_short": "at least one item", "too_long": "one item"} | dict.fromkeys(
    ("model_type", "dict_type"), "an object"
)


class Model(pydantic.BaseModel):
    """An object of a published format. Fields that are neither read nor written are not declared, and are no fault."""

    model_config = pydantic.ConfigDict(strict=True)

    @classmethod
    def made(cls, **fields: Any) -> Self:
        """An object with those of ``fields`` that are not None."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def written(self) -> JsonObject:
        """The fields that it was given."""
        return self.model_dump(exclude_unset=True)


M = TypeVar("M", bound=Model)


def read(model: type[M], value: Any) -> M:
    """``value`` as ``model``. Raises BadItem for its first fault."""
    refuse_surrogates(value)
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise _bad_item(error.errors(include_url=False)[0]) from None


def _bad_item(fault: Any) -> BadItem:
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault["loc"]).removeprefix(".")
    kind, value = fault["type"], fault["input"]
    of_shape = value is None or not path or kind in ("missing", "literal_error", "string_pattern_mismatch", "too_short")
    code = "R502" if path == "reward" else "S103" if of_shape else "S102"
    where = f"{path:.120}: " if path else ""
    if kind == "missing":
        return BadItem(code, f"{where}is missing")
    got = "an empty list" if value == [] else f"{value!r:.60}"
    return BadItem(code, f"{where}got {got}, expected {_EXPECTED.get(kind) or expected_text(fault):.80}")


def _finite(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _json_object(text: str) -> str:
    if not isinstance(loads(text), dict):
        raise ValueError("the JSON text of an object")
    return text


Int32 = Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31)]
#: JSON has names for numbers that are not finite.
Number = Annotated[float, pydantic.BeforeValidator(_finite)]


class Columns(Model):
    """The columns of a rollout besides its messages and turns."""

    rollout_id: str
    run_id: str
    task_id: str
    group_id: str
    rollout_index: Int32
    policy: str
    policy_hash: str
    policy_version: Int32
    status: str
    stop_reason: str | None
    finish_reason: str | None
    reward: Number | None
    rewards: dict[str, Number | None]
    temperature: Number
    tools: str
    task: str
    extra: Annotated[str, pydantic.AfterValidator(_json_object)]
    started_at: str
    duration_s: Number

    @classmethod
    def of(cls, row: RolloutRow) -> Columns:
        """Those of a row as ``store.columns.to_rows`` gives it."""
        when, values = row["started_at"], {name: row[name] for name in cls.model_fields}
        values["started_at"] = when if isinstance(when, str) else when.isoformat()
        return cls(**values | {"temperature": shortest(row["temperature"])})

    def row(self, reward: float | None, conversation: Conversation) -> RolloutRow:
        """The rollouts row with this reward, messages and turns."""
        turns = conversation.turns().columns()
        return self.model_dump() | {"reward": reward, "messages": conversation.messages, **turns}


class Span(Model):
    version: str
    start: Annotated[int, pydantic.Field(ge=0, lt=2**31)]
    end: Annotated[int, pydantic.Field(ge=0, lt=2**31)]


class TopLogProb(Model):
    id: Int32
    log_prob: Number


class Evidence(Model):
    """The fields of a turn besides ids and log-probabilities, and those where a format has no place for them."""

    finish_reason: str = "stop"
    agent: str | None = None
    reward: Number | None = None
    server: str | None = None
    weight_versions: list[Span] | None = None
    rendered: bool | None = None
    top_log_probs: list[list[TopLogProb]] | None = None
    log_probs: list[Number] | None = None

    @classmethod
    def of(cls, turn: Turn | Mapping[str, Any], **more: Any) -> Evidence:
        """That of a turn; ``more``: fields that are said in any case."""
        return cls.made(**{name: turn.get(name) for name in cls.model_fields} | more)

    def call(self, prompt: list[int], generation: list[int], log_probs: list[float] | None) -> Call:
        """The model call of these lists; without a log-probability for each token they are NaN."""
        if log_probs is None or len(log_probs) != len(generation):
            log_probs = [math.nan] * len(generation)
        with np.errstate(over="ignore"):
            numbers = np.array(log_probs, np.float32)
        facts = self.model_dump(exclude={"log_probs"})
        return Call(np.array(prompt, np.int32), np.array(generation, np.int32), numbers, **facts)


class Facts(Model):
    """The fields of a message that reading its foreign form would get wrong, and of the turn that wrote it."""

    role: str = ""
    content: str | None = None
    reasoning: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    turn: Int32 | None = None
    extra: str | None = None
    evidence: Evidence | None = None


class Free(Model):
    """The free object of an entry."""

    gymdata: Facts | None = None


class Entry(Model):
    """What one message of a conversation is in another format."""

    def free(self) -> Free | None:
        raise NotImplementedError

    def plain_message(self) -> Message:
        """The message without its facts, which gymdata's own files have."""
        raise NotImplementedError

    def facts(self) -> Facts:
        return (self.free() or Free()).gymdata or Facts()

    def full_message(self) -> Message:
        """The message with its facts."""
        return self.plain_message() | self.facts().model_dump(exclude_unset=True, exclude={"evidence"})

    def beyond(self, message: Message, evidence: Evidence | None = None) -> Facts | None:
        """The facts of ``message``, which this was made of, and of its turn; None where there are none."""
        plain = self.plain_message()
        facts: JsonObject = {name: message.get(name) for name in plain if message.get(name) != plain[name]}
        facts |= {} if evidence is None else {"evidence": evidence}
        return Facts(**facts) if facts else None


class Conversation:
    """The messages of a rollout and its model calls, as they come in a file."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        #: Number of its turn where it is known, the call, and its message; None where the messages have none.
        self._calls: list[tuple[int | None, Call, Message | None]] = []

    def add(self, entry: Entry, call: Call | None = None, *, aside: bool = False) -> None:
        """A message with the call that wrote it. ``aside``: only the call belongs to the rollout."""
        message = entry.full_message()
        if call is not None:
            self._calls.append((message["turn"], call, None if aside else message))
        if not aside:
            self.messages.append(message)

    def turns(self) -> TurnEncoder:
        """The turns; messages get the number of theirs. Raises BadItem."""
        calls, encoder = self._calls, TurnEncoder()
        numbers: dict[int | None, int] = {}
        if all(number is not None for number, *_ in calls):
            # They were called in that order, which need not be that of the messages.
            calls = sorted(calls, key=lambda call: call[0] or 0)
            numbers = {number: now for now, (number, *_) in enumerate(calls)}
            if len(numbers) < len(calls):
                raise BadItem("T208", "two messages are of one turn")
        for message in self.messages:
            message["turn"] = numbers.get(message["turn"])
        for now, (_, call, written) in enumerate(calls):
            encoder.add(call)
            if written is not None:
                written["turn"] = now
        return encoder


def shortest(value: Any) -> float:
    """A float32 as the shortest number that reads back as the same float32."""
    return float(str(np.float32(NON_FINITE[value] if isinstance(value, str) else value)))


def log_probs_of(turn: Turn) -> list[float]:
    return [shortest(value) for value in list_of(turn["generation_log_probs"])]


def list_of(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def named_turns(row: RolloutRow) -> set[int]:
    """The turns that an answer of the messages names."""
    named = {message.get("turn") for message in row["messages"] if message["role"] == "assistant"}
    return {turn for turn in named if turn is not None and 0 <= turn < len(row["turns"])}
