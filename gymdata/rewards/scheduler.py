"""How rollouts get rewards, while they are collected and afterwards.

Invariants: each named part is kept; a function that fails leaves its part null and says why, and never turns into
a number; the total is Σ weight·value over the parts that apply (a function that answers None says that it does not
apply), and null when none does or any failed. Functions score each rollout on its own: how they are batched must not
matter, because it depends on what finished when.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

import pyarrow as pa

from gymdata.errors import DataError, OutsideError
from gymdata.rewards.port import TRIES, RewardFunction, RewardPart, TaskRow, Value, View
from gymdata.rollouts.messages import Message, RolloutRow, ScoreRow
from gymdata.rollouts.turns import Turn

_BATCH = 64
_BEYOND = "the weighted sum of the parts is beyond float64"
_FLIPS_AT_ONCE = 4_096
#: Columns that ``saved_view`` reads, besides the rollout's id and, for rewards that read tokens, ``turns``.
VIEWED = ("status", "messages", "tools", "task", "extra", "n_turns", "n_generated_tokens")


@dataclass(frozen=True, slots=True)
class Weighted:
    """A reward function and its weight in the total.

    ``choose`` gives the weight for each rollout instead, or None where the function is not called at all.
    """

    function: RewardFunction
    weight: float = 1.0
    choose: Callable[[View], float | None] | None = None

    def weight_for(self, view: View) -> float | None:
        return self.weight if self.choose is None else self.choose(view)


@dataclass(frozen=True, slots=True)
class Scored:
    """The parts of one rollout, and the functions that failed on it, by name."""

    parts: list[RewardPart]
    faults: dict[str, str]


def total(parts: Sequence[RewardPart]) -> float | None:
    """Σ weight·value over the parts with a value; None without any, or when the sum is beyond float64."""
    values = [part.weight * part.value for part in parts if part.value is not None]
    result = sum(values) if values else None
    return result if result is not None and math.isfinite(result) else None


def score_batch(rewards: Sequence[Weighted], views: Sequence[View]) -> list[Scored]:
    """Score finished rollouts. A batch that makes a function fail is scored one by one, three tries each, unless the fault
    is fatal; a function that knows which rollouts it failed on returns an OutsideError in their places."""
    result = [Scored([], {}) for _ in views]
    for reward in rewards:
        weights = [reward.weight_for(view) for view in views]
        weighted = [row for row, weight in enumerate(weights) if weight is not None]
        values = _values(reward.function, [views[row] for row in weighted]) if weighted else []
        name = reward.function.name
        for row, value in zip(weighted, values, strict=True):
            weight = weights[row] or 0.0
            if isinstance(value, OutsideError):
                result[row].faults[name] = value.message
                result[row].parts.append(RewardPart(name, None, weight, value.message))
            elif isinstance(value, tuple):
                scored = [step for step in value if step is not None]
                steps = ", ".join("none" if step is None else f"{step:g}" for step in value)
                sum_ = math.fsum(scored) if scored else None
                result[row].parts.append(RewardPart(name, sum_, weight, f"per turn: {steps}", value))
            else:
                result[row].parts.append(RewardPart(name, value, weight))
    return result


def step_rewards(parts: Sequence[RewardPart], turns: int) -> list[float | None]:
    """Each turn's Σ weight·step over the parts that score turns; None where none of them scores it."""
    totals: list[float | None] = [None] * turns
    for part in parts:
        for turn, step in enumerate(part.steps or ()):
            if step is not None:
                totals[turn] = (totals[turn] or 0.0) + part.weight * step
    return totals


def _values(function: RewardFunction, views: Sequence[View]) -> list[Value]:
    try:
        return list(function(views))
    except OutsideError as error:
        if error.fatal:
            return [error] * len(views)
        if len(views) > 1:
            return [value for view in views for value in _values(function, [view])]
        last = error
    for _ in range(TRIES - 1):
        try:
            return list(function(views))
        except OutsideError as error:
            last = error
    return [last]


def view_of(
    *,
    messages: Sequence[Message],
    produced_by: Sequence[int | None],
    task: TaskRow,
    tools: Sequence[Mapping[str, object]] | None,
    turns: Sequence[Turn],
    status: str,
    environment: Mapping[str, object] | None = None,
) -> View:
    """A rollout as a reward function sees it. ``environment``: the environment's verdict."""
    ids: list[int] = []
    for number, call in enumerate(turns):
        if number:
            ids.extend(int(token) for token in call["prompt_delta_ids"])
        sampled = call["generation_token_ids"]
        ids.extend(sampled.tolist() if hasattr(sampled, "tolist") else sampled)
    first = next((i for i, turn in enumerate(produced_by) if turn is not None), len(messages))
    generated = [m for m, turn in zip(messages, produced_by, strict=True) if turn is not None]
    return {
        "messages": list(messages),
        "prompt": list(messages[:first]),
        "completion": list(messages[first:]),
        "text": (generated[-1].get("content") or "") if generated else "",
        "completion_ids": ids,
        "task": task,
        "tools": tools,
        "turns": turns,
        "status": status,
        "stdout": (environment or {}).get("stdout"),
        "stderr": (environment or {}).get("stderr"),
        "exit_code": (environment or {}).get("exit_code"),
        "output_obj": (environment or {}).get("output_obj"),
        "directory": (environment or {}).get("directory"),
    }


def counted_calls(messages: Sequence[Message]) -> list[int | None]:
    """The model call of each message where no row says it (imported ones): every assistant
    message counts as a call."""
    numbers = itertools.count()
    return [next(numbers) if message["role"] == "assistant" else None for message in messages]


@dataclass(slots=True)
class RewardScheduler:
    """Scores rollouts as they finish. Quick functions run at once; the others in a thread, on whatever has gathered.

    A batch that takes longer than ``timeout_s`` fails for all of its members; its thread is left behind. Functions that
    end by themselves (``bounded``) are not cut off. ``in_thread`` runs a function elsewhere and awaits its result.
    """

    rewards: Sequence[Weighted]
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread
    timeout_s: float | None = 300.0
    _waiting: list[tuple[View, asyncio.Future[Scored]]] = field(default_factory=list)
    _busy: asyncio.Task[None] | None = None

    async def score(self, view: View | DataError) -> Scored:
        """``view``: of a rollout, or why it cannot be read: then all functions failed on it, with that as the reason."""
        if isinstance(view, DataError):
            parts = [RewardPart(r.function.name, None, r.weight, detail=view.message) for r in self.rewards]
            return Scored(parts, dict.fromkeys((part.name for part in parts), view.message))
        if all(reward.function.quick for reward in self.rewards):
            return score_batch(self.rewards, [view])[0]
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._waiting.append((view, future))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        bounded = all(reward.function.bounded for reward in self.rewards)
        limit = None if bounded else self.timeout_s
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            views = [view for view, _ in batch]
            try:
                results = await asyncio.wait_for(self.in_thread(score_batch, self.rewards, views), limit)
            except TimeoutError:
                results = [self._late(view) for view in views]
            except BaseException as error:  # noqa: BLE001 - a defect or cancellation: waiting callers must get it
                for _, future in batch + self._waiting:
                    if not future.done():
                        future.set_exception(error)
                self._waiting.clear()
                return
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def _late(self, view: View) -> Scored:
        """Every function that a rollout was to be scored by gave no answer in time."""
        fault = f"no answer within {self.timeout_s:g} s"
        weights = [(reward.function.name, reward.weight_for(view)) for reward in self.rewards]
        parts = [RewardPart(name, None, weight, fault) for name, weight in weights if weight is not None]
        return Scored(parts, {part.name: fault for part in parts})


def saved_view(row: RolloutRow) -> View | DataError:
    """``view_of`` a row of the rollouts table; without its ``turns``, ``completion_ids`` is empty. The error names the
    rollout and the field whose text is not the JSON that it must be."""
    where, verdict = f"rollout {row['rollout_id']}", None
    # `validate` reports other text; only rewards that take what is in it have a use for it.
    with contextlib.suppress(DataError):
        verdict = _from_json(row, "extra", dict, where).get("environment")
    produced_by = [message.get("turn") for message in row["messages"]]
    # Time may have run out before the first token: then an assistant's messages are the task's own.
    sampled = row["n_generated_tokens"] or not row["n_turns"]
    if sampled and not any(turn is not None for turn in produced_by):
        produced_by = counted_calls(row["messages"])
    try:
        return view_of(
            messages=[_chat_message(message, f"{where}, message {n}") for n, message in enumerate(row["messages"])],
            produced_by=produced_by,
            task=_from_json(row, "task", dict, where),
            tools=_from_json(row, "tools", list, where) or None,
            turns=row.get("turns") or [],
            status=row["status"],
            environment=verdict if isinstance(verdict, Mapping) else None,
        )
    except DataError as error:
        return error


def score_rows(
    row: RolloutRow, scored: Scored, sources: Mapping[str, str], name: str
) -> tuple[list[ScoreRow], float | None]:
    """Rows of the scores table for one rollout, and its total. The total is a row too unless a part has its ``name``.

    ``sources``: the source of each function, by name.
    """
    rows = [
        _score_row(row, part.name, part.value, sources[part.name], part.name in scored.faults, part.detail)
        for part in scored.parts
    ]
    value = None if scored.faults else total(scored.parts)
    if all(part.name != name for part in scored.parts):
        source = " + ".join(f"{part.weight:g}*{part.name}" for part in scored.parts) or "no reward"
        beyond = value is None and not scored.faults and any(part.value is not None for part in scored.parts)
        rows.append(_score_row(row, name, value, source, bool(scored.faults) or beyond, _BEYOND if beyond else None))
    elif len(scored.parts) == 1 and scored.parts[0].weight == 1:
        value = scored.parts[0].value
    elif len(scored.parts) == 1:
        # The only part is the total, and has its weight.
        rows[0]["value"] = value
        if value is None and scored.parts[0].value is not None:
            rows[0] |= {"status": "failed", "detail": _BEYOND}
    return rows, value


@dataclass(slots=True)
class PartTally:
    """Counts of one reward function: rollouts with a value, those it does not apply to, and those it failed on."""

    name: str
    needs: str | None = None
    scored: int = 0
    does_not_apply: int = 0
    failed: int = 0
    first_error: str | None = None

    def add(self, value: float | None, fault: str | None) -> None:
        """Count one rollout's part; ``fault``: why it failed."""
        if fault is not None:
            self.failed += 1
            self.first_error = self.first_error or fault.removeprefix("reward: ")
        elif value is None:
            self.does_not_apply += 1
        else:
            self.scored += 1

    def lines(self) -> list[tuple[str, object]]:
        """Names and values for people; nothing where every rollout has a value."""
        rows: list[tuple[str, object]] = []
        if self.failed:
            rows.append((f"{self.name} failed", f"{self.failed:,}; first: {self.first_error}"))
        if self.does_not_apply:
            needs = f"; it needs {self.needs}" if self.needs else ""
            rows.append((f"{self.name} does not apply", f"{self.does_not_apply:,}{needs}"))
        return rows


def tallies(rewards: Sequence[Weighted]) -> dict[str, PartTally]:
    """An empty tally for each function, by name."""
    names = [(reward.function.name, reward.function.needs) for reward in rewards]
    return {name: PartTally(name, needs) for name, needs in names}


class Flipped(Sequence[dict[str, Any]]):
    """Rollouts that flipped, each with ``rollout_id``, ``task_id``, ``rollout_index``, ``old`` and ``new``; they are held in
    columns, which take a fifth of the memory."""

    def __init__(self) -> None:
        self._columns: list[pa.RecordBatch] = []
        self._rows: list[dict[str, Any]] = []

    def append(self, row: RolloutRow) -> None:
        self._rows.append(row)
        if len(self._rows) == _FLIPS_AT_ONCE:
            self._columns.append(pa.RecordBatch.from_pylist(self._rows))
            self._rows = []

    def __len__(self) -> int:
        return len(self._columns) * _FLIPS_AT_ONCE + len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        batch, row = divmod(range(len(self))[index], _FLIPS_AT_ONCE)
        if batch == len(self._columns):
            return self._rows[row]
        return self._columns[batch].slice(row, 1).to_pylist()[0]


@dataclass(slots=True)
class Flips:
    """How new scores differ from old ones. A flip is a change of side of ``threshold``; ``flipped`` lists every one."""

    threshold: float = 0.5
    compared: int = 0
    changed: int = 0
    up: int = 0
    down: int = 0
    newly_scored: int = 0
    no_longer_scored: int = 0
    flipped: Flipped = field(default_factory=Flipped)

    def add(self, row: RolloutRow, old: float | None, new: float | None) -> None:
        """Compare one rollout's scores."""
        if old is None or new is None:
            self.newly_scored += old is None and new is not None
            self.no_longer_scored += old is not None and new is None
            return
        self.compared += 1
        self.changed += abs(old - new) > 1e-9
        was, now = old > self.threshold, new > self.threshold
        if was == now:
            return
        self.up += now
        self.down += was
        named = {key: row[key] for key in ("rollout_id", "task_id", "rollout_index")}
        self.flipped.append({**named, "old": old, "new": new})


def old_score(row: RolloutRow, name: str, *, weight: float = 1.0, or_total: bool = True) -> float | None:
    """The saved score of the row: ``weight`` times its part of that name, else its total reward (or None)."""
    for part in row["rewards"]:
        if part["name"] == name:
            return None if part["value"] is None else weight * part["value"]
    reward: float | None = row["reward"] if or_total else None
    return reward


def _score_row(
    row: RolloutRow, name: str, value: float | None, source: str, failed: bool, detail: str | None
) -> ScoreRow:
    return {
        "rollout_id": row["rollout_id"],
        "name": name,
        "value": value,
        "status": "failed" if failed else "scored",
        "source": source,
        "run_id": row["run_id"],
        "detail": detail if failed or value is not None else "does not apply",
    }


def _chat_message(message: Message, where: str) -> Message:
    chat = {k: v for k, v in message.items() if v is not None and k not in ("turn", "extra", "tool_calls")}
    chat.setdefault("content", None)
    if message.get("tool_calls"):
        chat["tool_calls"] = _from_json(message, "tool_calls", list, where)
    return {**_from_json(message, "extra", dict, where), **chat}


def _from_json(row: RolloutRow, name: str, kind: type[list[Any]] | type[dict[str, Any]], where: str) -> Any:
    """The value of a column of JSON text; empty for null. Raises DataError for any other text."""
    text = row.get(name)
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if value is None and text.strip() == "null":
        return kind()
    calls = name != "tool_calls" or (isinstance(value, list) and all(isinstance(call, dict) for call in value))
    if not isinstance(value, kind) or not calls:
        raise DataError.bad_json(f"{where}, field {name!r}", text, "a list of objects" if kind is list else "an object")
    return value
