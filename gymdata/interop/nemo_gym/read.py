"""NeMo Gym rows as rows of the rollouts table, with their token evidence.

Invariants: ids are taken over exactly, and log-probabilities as float32; a call without ids gives no turn; what has no
column is kept in ``task`` and ``extra`` so that the row can be written again, token lists only where no turn holds them; a
row that cannot be imported is named, and never hides another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gymdata.interop.importing import (
    ODD,
    BadItem,
    Importing,
    Numbering,
    reason_of,
    rollout_id_of,
    run_id_of,
    turn_down,
)
from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.interop.nemo_gym.batches import encoded
from gymdata.interop.rows import unread_row, without_reward
from gymdata.rollouts.failures import UNSCORED
from gymdata.rollouts.messages import (
    STRICT,
    TOKEN_KEYS,
    JsonObject,
    Message,
    ResponseItem,
    RolloutRow,
    flat_items,
    holds_ids,
    messages_of,
    object_of,
    parsed,
    row_tools,
    walk,
    written_by_model,
)
from gymdata.rollouts.ragged import Columns, Runs
from gymdata.rollouts.turns import Call, TurnEncoder, continuing
from gymdata.store.lines import row_lines
from gymdata.store.paths import Source

#: On an item: its ids were rendered from text, not sampled.
RENDERED = "token_ids_rendered"
#: A mark besides the letters of the lists that a turn holds: its log-probabilities had more digits than float32.
ROUNDED = "~"
#: Where ``task`` and ``extra`` keep JSON that strict readers refuse (NaN), as text.
AS_TEXT = "nemo_gym_text"


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
                    parsed = _read(line)
                except nemo_rows.BadRow:
                    if (attempt := _unread(line, importing, of_failures)) is None:
                        raise
                    importing.keys.append(importing.n_keys - 1)
                    yield attempt
                    continue
                # Numbered before the check, so that rollouts are numbered alike with and without it.
                group, index = importing.numbering.of_content(line.strip(), parsed.row.group, parsed.row.given)
                rollout = _rollout(parsed, importing.run_id, group, index)
                if (failure := nemo_rows.failure_in(parsed.row.value, of_failures)) is not None:
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
            own = object_of(parsed.row.value.get("gymdata")).get("rollout_index") == rollout["rollout_index"]
            importing.keys.append(None if own else importing.n_keys - 1)
            importing.origins.append((source.path, number))
            yield rollout


def _unread(line: bytes, importing: Importing, of_failures: bool) -> RolloutRow | None:
    """The row of a failed attempt that has no response to read; None for any other row."""
    if (attempt := nemo_rows.failed_attempt(line, of_failures)) is None:
        return None
    value, failure = attempt
    row = without_reward(unread_row(value, importing), failure)
    return row | {"rollout_index": _index(value, row["rollout_index"]), "task": _json(value, None)}


def _index(value: JsonObject, index: int) -> int:
    """The index that NeMo Gym gave the rollout, which a failed attempt and its retry share; else ``index``."""
    of_gym = value.get("_ng_rollout_index")
    return of_gym if type(of_gym) is int and 0 <= of_gym < 2**31 else index


@dataclass(slots=True)
class _Parsed:
    """A row, its value without the token lists that became turns."""

    row: nemo_rows.Row
    messages: list[Message]
    turns: _Turns
    #: For each turn: where its item is in the output (nested lists give several indices), and which lists it held.
    turn_paths: list[list[Any]]


def _read(line: bytes) -> _Parsed:
    """Raises BadRow."""
    row = nemo_rows.read_row(line)
    lists = len(TOKEN_KEYS) * len(row.calls)
    if row.cut_lists is not None and not (row.cut_lists == lists and all(map(_is_complete, row.calls))):
        # Lists that no turn holds stay in the row as they are.
        row = nemo_rows.read_carefully(line)
    output = row.value["response"]["output"]
    items = list(_with_ids(output, []))
    identities = {id(item) for _, item in items}
    turns = _turns(row, [item for _, item in items])
    # An item whose lists were taken out still ends its call.
    request_input = object_of(row.value.get("responses_create_params")).get("input")
    messages = list(messages_of(request_input, walk(output, lambda item: id(item) in identities), turns.of_call))
    turn_paths: list[list[Any]] = []
    for (path, item), letters in zip(items, turns.letters, strict=True):
        if letters:
            turn_paths.append([*path, letters])
        for name, letter in zip(TOKEN_KEYS, "pgl", strict=True):
            if letter in letters:
                item.pop(name, None)
    return _Parsed(row, messages, turns, turn_paths)


def _is_complete(call: nemo_rows.Call | None) -> bool:
    if call is None or not (call.prompt and call.generation) or call.log_probs is None:
        return False
    if len(call.log_probs) != len(call.generation):
        return False
    # Finite in float32, too.
    with np.errstate(over="ignore"):
        return bool((np.isfinite(call.log_probs.astype(np.float32)) == np.isfinite(call.log_probs)).all())


def _with_ids(items: Any, path: list[int]) -> Iterator[tuple[list[int], ResponseItem]]:
    """The items with ids that the model wrote, and where each is in lists of lists."""
    for index, item in enumerate(items):
        if isinstance(item, list):
            yield from _with_ids(item, [*path, index])
        elif written_by_model(item) and holds_ids(item):
            yield [*path, index], item


@dataclass(slots=True)
class _Turns:
    """The encoded turns of a row."""

    #: For each model call with ids, the turn that it became.
    of_call: dict[int, int] = field(default_factory=dict)
    #: For each item with token lists, in order, which of them (``p``, ``g``, ``l``) its turn holds, and whether
    #: log-probabilities lost digits (``ROUNDED``).
    letters: list[str] = field(default_factory=list)
    rows: Columns | list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    n_breaks: int = 0
    n_context_tokens: int = 0
    n_generated_tokens: int = 0


def _turns(row: nemo_rows.Row, items: Sequence[ResponseItem]) -> _Turns:
    """The calls with a prompt and a generation as turns. Raises BadRow for ids beyond 32 bits."""
    turns = _Turns()
    calls: list[nemo_rows.Call] = []
    log_probs: list[npt.NDArray[np.float32]] = []
    rendered: list[bool | None] = []
    with_ids = [(number, call) for number, call in enumerate(row.calls) if call is not None]
    for (number, call), item in zip(with_ids, items, strict=True):
        if not (call.prompt and call.generation):
            turns.letters.append("")
            continue
        # Too few or too many: it is not known which belongs to which token, so none is used.
        fits = _is_complete(call)
        wide = call.log_probs if fits and call.log_probs is not None else np.full(len(call.generation), np.nan)
        narrow = wide.astype(np.float32)
        turns.of_call[number] = len(calls)
        turns.letters.append(("pgl" + ROUNDED * more_than_float32(wide, narrow)) if fits else "pg")
        calls.append(call)
        log_probs.append(narrow)
        rendered.append(item.get(RENDERED) is True or None)
    if not calls:
        return turns
    reasons = ["stop"] * len(calls)
    if calls[-1] is row.calls[-1] and _status(row.value["response"])[0] == "truncated":
        reasons[-1] = "length"
    turns.finish_reason = reasons[-1]
    numbers = list(turns.of_call)
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


def more_than_float32(wide: Any, narrow: Any) -> bool:
    """Whether any of ``wide`` (float64) has more digits than ``narrow``, the same as float32, keeps: float32
    distinguishes decimals of up to nine digits, and a number that is a float32 already loses nothing, however it is
    written."""
    if len(wide) and _clearly_lost(float(wide[0]), float(narrow[0])):
        # When numbers have all their digits, one of them shows it.
        return True
    numbers = narrow.astype(np.float64)
    lost = (wide != numbers) & np.isfinite(wide)
    numbers = wide[lost]
    with np.errstate(all="ignore"):
        nine = 10.0 ** (8 - np.floor(np.log10(np.abs(numbers))))
        apart = np.abs(np.round(numbers * nine) / nine - numbers)
    # The product and the quotient are rounded, too. Numbers too small for nine digits (NaN here) are lost as a whole.
    return bool((~(apart <= 1e-13 * np.abs(numbers))).any())


def _clearly_lost(number: float, narrow: float) -> bool:
    """Whether one number surely has more, with room for rounding: arrays are slow where there are few."""
    size = abs(number)
    if number == narrow or not 1e-30 < size < 1e30:
        return False
    nine = 10.0 ** (8 - math.floor(math.log10(size)))
    return abs(round(size * nine) / nine - size) > 1e-12 * size


def _int32(wide: npt.NDArray[np.int64], call: int, first: int = 0) -> npt.NDArray[np.int32]:
    """``wide``, which begins at id ``first`` of its list. Raises BadRow."""
    ids = wide.astype(np.int32)
    if not (ids == wide).all():
        k = int(np.flatnonzero(ids != wide)[0])
        raise nemo_rows.BadRow(
            "S102", "token ids", turn=call, position=first + k, expected="a 32-bit integer", got=str(int(wide[k]))
        )
    return ids


def _rollout(parsed: _Parsed, run: str, group: str, index: int) -> RolloutRow:
    row, turns = parsed.row, parsed.turns
    value = row.value
    plain = row.cut_lists is not None
    response = value["response"]
    params = object_of(value.get("responses_create_params"))
    model = str(response.get("model") or params.get("model") or "unknown")
    status, why = _status(response)
    # Rows that gymdata wrote have what NeMo Gym has no place for, and which limit it was.
    own, name = object_of(value.get("gymdata")), row.rollout_id or rollout_id_of(run, group, index)
    index = _index(value, index)
    if row.rollout_id and type(own.get("rollout_index")) is int and 0 <= own["rollout_index"] < 2**31:
        index = own["rollout_index"]
    neutral = {"policy_hash": f"served:{model}", "policy_version": 0, "duration_s": 0.0}
    if status == "truncated" and isinstance(own.get("stop_reason"), str):
        why = own["stop_reason"]
    temperature: Any = params.get("temperature")
    fields: JsonObject = {"keys": list(value), "response": response, "turns": parsed.turn_paths}
    if "reward" in value and type(value["reward"]) is not float:
        # 1 and 1.0 are equal, but have different texts.
        fields["reward"] = value["reward"]
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
        "messages": parsed.messages,
        "tools": row_tools(value),
        "task": _json({k: v for k, v in value.items() if k not in ("response", "reward")}, None, plain=plain),
        "extra": _json(fields, "nemo_gym", plain=plain),
        "turns": turns.rows,
        "started_at": datetime.fromtimestamp(seconds if has_time else 0, UTC).isoformat(),
        **neutral,
        **{name: own[name] for name, value in neutral.items() if type(own.get(name)) is type(value)},
    }


def _json(value: JsonObject, name: str | None, *, plain: bool = False) -> str:
    """The text of ``value``; ``plain``: orjson can write it. The same value has the same text however it was read."""
    document = {name: value} if name else value
    if not plain:
        try:
            text = STRICT.encode(document)
        except ValueError:
            return json.dumps({AS_TEXT: json.dumps(value, ensure_ascii=False)}, ensure_ascii=False)
    try:
        return orjson.dumps(document).decode()
    except TypeError:
        # Whole numbers of more than 64 bits.
        return text


def _status(response: Any) -> tuple[str, str | None]:
    details = response.get("incomplete_details")
    written = [item for item in flat_items(response["output"]) if isinstance(item, dict) and written_by_model(item)]
    cut = bool(written) and written[-1].get("status") == "incomplete"
    if response.get("status") == "incomplete" or details or cut:
        reason = details.get("reason") if hasattr(details, "get") else None
        return "truncated", str(reason) if reason else "incomplete"
    return "completed", None


def kept_rows(row: JsonObject) -> tuple[JsonObject, JsonObject, bool] | None:
    """The fields of its source that an imported row keeps in ``task`` and ``extra``, and whether orjson can write it;
    None for a row that came from elsewhere."""
    extra, plain = parsed(row["extra"] or "{}")
    if AS_TEXT in extra:
        fields, plain = parsed(extra[AS_TEXT])
    else:
        fields = extra.get("nemo_gym")
    if not isinstance(fields, dict) or "fixed" in extra or len(fields.get("turns", ())) != len(row["turns"]):
        return None
    task, strict = parsed(row["task"] or "{}")
    if AS_TEXT in task:
        task, strict = parsed(task[AS_TEXT])
    return fields | {UNSCORED: object_of(extra.get(UNSCORED))}, task, plain and strict
