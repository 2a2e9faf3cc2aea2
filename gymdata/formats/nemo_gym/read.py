"""NeMo Gym rows as rows of the rollouts table, with their token evidence.

Invariants: ids are taken over exactly, and log-probabilities as float32; a call without ids gives no turn; the fields of the
row are in ``task``, those of its response in ``extra``; a row that cannot be imported is named, and never hides another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.formats.conversion.importing import (
    ODD,
    BadItem,
    Importing,
    Numbering,
    reason_of,
    rollout_id_of,
    run_id_of,
    turn_down,
)
from gymdata.formats.conversion.rows import unread_row, without_reward
from gymdata.formats.nemo_gym import rows as nemo_rows
from gymdata.formats.nemo_gym.batches import encoded
from gymdata.rollouts.messages import (
    JsonObject,
    RolloutRow,
    flat_items,
    messages_of,
    object_of,
    row_tools,
    walk,
    written_by_model,
)
from gymdata.rollouts.ragged import Columns, Runs
from gymdata.rollouts.turns import Call, TurnEncoder, continuing
from gymdata.store.lines import encode_any, row_lines
from gymdata.store.paths import Source

#: In ``extra``: the fields of the response besides its output.
RESPONSE = "response"


def table_rows(sources: list[Source], importing: Importing | None = None) -> Iterator[RolloutRow]:
    """The rollout rows of NeMo Gym files, as the store takes them: turns as ``Columns`` or with numpy arrays, times as text.

    Rows of one prompt (or of one ``task_id``) are a group. A log-prob that the source lacks is NaN. ``importing``: by
    default that of a run whose id is a hash of the file names, where a bad row raises DataError.
    """
    importing = importing or Importing(run_id_of(sources), Numbering())
    for source in sources:
        of_failures = nemo_rows.main_file(source.path) is not None
        for number, line in row_lines(source):
            try:
                try:
                    row = nemo_rows.read_row(line)
                except nemo_rows.BadRow:
                    if (attempt := _unread(line, importing, of_failures)) is None:
                        raise
                    yield attempt
                    continue
                # Numbered before the check, so that rollouts are numbered alike with and without it.
                group, index = importing.numbering.of_content(line.strip(), row.group, row.given)
                if _own_index(row) is not None:
                    group = row.group or group  # as gymdata wrote it, whatever the prompts of the group are
                rollout = _rollout(row, importing.run_id, group, index)
                if (failure := nemo_rows.failure_in(row.value, of_failures)) is not None:
                    rollout = without_reward(rollout, failure)
                if importing.check is not None:
                    importing.check(rollout)
            except (nemo_rows.BadRow, BadItem, *ODD) as error:
                bad = error if isinstance(error, nemo_rows.BadRow) else nemo_rows.BadRow("S102", reason_of(error))
                labels = [f"{name} {bad.more[name]}" for name in ("turn", "position") if bad.more.get(name) is not None]
                values = [f"{word} {bad.more[word]}" for word in ("expected", "got") if bad.more.get(word)]
                reason = "; ".join(part for part in (bad.detail, ", ".join(labels), *values) if part)
                turn_down(bad.code, reason, source, number, line, importing.reject, "a NeMo Gym rollout", error)
                continue
            importing.origins.append((source.path, number))
            yield rollout


def _unread(line: bytes, importing: Importing, of_failures: bool) -> RolloutRow | None:
    """The row of a failed attempt that has no response to read; None for any other row."""
    if (attempt := nemo_rows.failed_attempt(line, of_failures)) is None:
        return None
    value, failure = attempt
    row = without_reward(unread_row(value, importing), failure)
    return row | {"rollout_index": _index(value, row["rollout_index"]), "task": encode_any(value).decode()}


def _index(value: JsonObject, index: int) -> int:
    """The index that NeMo Gym gave the rollout, which a failed attempt and its retry share; else ``index``."""
    of_gym = value.get("_ng_rollout_index")
    return of_gym if type(of_gym) is int and 0 <= of_gym < 2**31 else index


def _own_index(row: nemo_rows.Row) -> int | None:
    """The index of a row that gymdata wrote; None of any other row."""
    index = object_of(row.value.get("gymdata")).get("rollout_index")
    return index if row.rollout_id and type(index) is int and 0 <= index < 2**31 else None


@dataclass(slots=True)
class _Turns:
    """The encoded turns of a row."""

    #: For each model call with ids, the turn that it became.
    of_call: dict[int, int] = field(default_factory=dict)
    rows: Columns | list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    n_breaks: int = 0
    n_context_tokens: int = 0
    n_generated_tokens: int = 0


def _log_probs(call: nemo_rows.Call) -> npt.NDArray[np.float32]:
    """One for each generated id, NaN where they are not known: of too few or too many it is not known which belongs to
    which."""
    unknown = np.full(len(call.generation), np.nan, np.float32)
    if call.log_probs is None or len(call.log_probs) != len(call.generation):
        return unknown
    with np.errstate(over="ignore"):
        narrow = call.log_probs.astype(np.float32)
    # Beyond float32 they are none.
    return narrow if bool((np.isfinite(narrow) == np.isfinite(call.log_probs)).all()) else unknown


def _turns(row: nemo_rows.Row) -> _Turns:
    """The calls with a prompt and a generation as turns. Raises BadRow for ids beyond 32 bits."""
    turns = _Turns()
    numbered = [(n, call) for n, call in enumerate(row.calls) if call is not None and call.prompt and call.generation]
    if not numbered:
        return turns
    numbers, calls = [n for n, _ in numbered], [call for _, call in numbered]
    turns.of_call = {number: turn for turn, number in enumerate(numbers)}
    log_probs = [_log_probs(call) for call in calls]
    rendered: list[bool | None] = [call.rendered or None for call in calls]
    reasons = ["stop"] * len(calls)
    if calls[-1] is row.calls[-1] and _status(row.value["response"])[0] == "truncated":
        reasons[-1] = "length"
    turns.finish_reason = reasons[-1]
    parents, prefixes, deltas = encoded(calls)
    generations = [_int32(call.generation.values, number) for call, number in zip(calls, numbers, strict=True)]
    ends = [prefix + len(delta) + len(ids) for prefix, delta, ids in zip(prefixes, deltas, generations, strict=True)]
    if parents == list(range(-1, len(calls) - 1)) and prefixes[1:] == ends[:-1]:
        new = [_int32(*of_call) for of_call in zip(deltas, numbers, prefixes, strict=True)]
        flat = np.concatenate(log_probs)
        if not np.isnan(flat).any():
            prompts, sampled = (Runs(np.concatenate(lists), list(map(len, lists))) for lists in (new, generations))
            turns.rows = continuing(prompts, sampled, flat, reasons, rendered)
            turns.n_context_tokens, turns.n_generated_tokens = len(prompts.values), len(flat)
            return turns
    encoder = TurnEncoder()
    for call, number, generation, numbers_of, reason, is_rendered in zip(
        calls, numbers, generations, log_probs, reasons, rendered, strict=True
    ):
        prompt = _int32(call.prompt.all_values(), number)
        encoder.add(Call(prompt, generation, numbers_of, reason, rendered=is_rendered))
    turns.rows, turns.n_breaks = encoder.turns, encoder.n_breaks
    turns.n_context_tokens, turns.n_generated_tokens = encoder.n_context_tokens, encoder.n_generated_tokens
    return turns


def _int32(wide: npt.NDArray[np.int64], call: int, first: int = 0) -> npt.NDArray[np.int32]:
    """``wide``, which begins at id ``first`` of its list. Raises BadRow."""
    ids = wide.astype(np.int32)
    if not (ids == wide).all():
        k = int(np.flatnonzero(ids != wide)[0])
        raise nemo_rows.BadRow(
            "S102", "token ids", turn=call, position=first + k, expected="a 32-bit integer", got=str(int(wide[k]))
        )
    return ids


def _rollout(row: nemo_rows.Row, run: str, group: str, index: int) -> RolloutRow:
    turns, value = _turns(row), row.value
    response = value["response"]
    params = object_of(value.get("responses_create_params"))
    model = str(response.get("model") or params.get("model") or "unknown")
    status, why = _status(response)
    # Rows that gymdata wrote have what NeMo Gym has no place for, and which limit it was.
    own, name = object_of(value.get("gymdata")), row.rollout_id or rollout_id_of(run, group, index)
    index = _index(value, index)
    if (own_index := _own_index(row)) is not None:
        index = own_index
    neutral = {"policy_hash": f"served:{model}", "policy_version": 0, "duration_s": 0.0}
    if status == "truncated" and isinstance(own.get("stop_reason"), str):
        why = own["stop_reason"]
    temperature: Any = params.get("temperature")
    seconds = response.get("created_at")
    task = value.get("task_id")
    has_time = type(seconds) in (int, float) and 0 <= seconds < 2**34
    return {
        "rollout_id": name,
        "run_id": run,
        "task_id": str(task) if isinstance(task, (str, int)) and str(task) != row.group else group,
        "group_id": group,
        "rollout_index": index,
        "policy": model,
        "status": status,
        "stop_reason": why,
        "finish_reason": turns.finish_reason,
        "reward": row.reward,
        "rewards": [{"name": name, "value": part} for name, part in object_of(own.get("rewards")).items()],
        "temperature": float(temperature) if type(temperature) in (int, float) and 0 <= temperature < 1e9 else 1.0,
        "n_turns": len(turns.rows),
        "n_breaks": turns.n_breaks,
        "n_context_tokens": turns.n_context_tokens,
        "n_generated_tokens": turns.n_generated_tokens,
        "messages": list(messages_of(params.get("input"), walk(response["output"]), turns.of_call)),
        "tools": row_tools(value),
        "task": encode_any({k: v for k, v in value.items() if k not in ("response", "reward")}).decode(),
        "extra": encode_any({RESPONSE: {k: v for k, v in response.items() if k != "output"}}).decode(),
        "turns": turns.rows,
        "started_at": datetime.fromtimestamp(seconds if has_time else 0, UTC).isoformat(),
        **neutral,
        **{name: own[name] for name, value in neutral.items() if type(own.get(name)) is type(value)},
    }


def _status(response: Any) -> tuple[str, str | None]:
    details = response.get("incomplete_details")
    written = [item for item in flat_items(response["output"]) if isinstance(item, dict) and written_by_model(item)]
    cut = bool(written) and written[-1].get("status") == "incomplete"
    if response.get("status") == "incomplete" or details or cut:
        reason = details.get("reason") if hasattr(details, "get") else None
        return "truncated", str(reason) if reason else "incomplete"
    return "completed", None
