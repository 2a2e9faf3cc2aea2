"""NeMo Gym rows as rows of the rollouts table, with their token evidence.

Invariants: ids are taken over exactly, and log-probabilities as float32; a call without ids gives no turn, and is never
context of a later one; the fields of the row are in ``task``, those of its response in ``extra``; a row that cannot be
imported is named, and never hides another.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.formats.conversion.importing import (
    ODD,
    BadItem,
    CallIds,
    Importing,
    Numbering,
    Origin,
    rollout_id_of,
)
from gymdata.formats.conversion.rows import unread_row, without_reward
from gymdata.formats.nemo_gym.cut import Call
from gymdata.formats.nemo_gym.rows import Attempt, BadRow, Row, read_any, read_rows
from gymdata.formats.text.words import score
from gymdata.rollouts import turns as encoding
from gymdata.rollouts.messages import (
    GENERATION,
    LOG_PROBS,
    PROMPT,
    JsonObject,
    RolloutRow,
    messages_of,
    object_of,
    row_tools,
    written_by_model,
)
from gymdata.rollouts.turns import TurnEncoder
from gymdata.store.lines import decode, encode
from gymdata.store.paths import Source

#: In ``extra``: the fields of the response besides its output.
RESPONSE = "response"


def table_rows(sources: list[Source], importing: Importing | None = None) -> Iterator[RolloutRow]:
    """The rollout rows of NeMo Gym files, as the store takes them: turns with numpy arrays, times as text.

    Rows of one prompt (or of one ``task_id``) are a group. A log-prob that the source lacks is NaN. ``importing``: by
    default that of a run whose id is a hash of the file names, where a bad row raises DataError.
    """
    names = "\n".join(str(source.path) for source in sources).encode()
    importing = importing or Importing(f"import-{blake2b(names, digest_size=8).hexdigest()}", Numbering())
    for source in sources:
        for number, line, read in read_rows(source):
            origin = Origin(source.path, number)
            try:
                row = _row(read, line, importing)
            except (BadItem, *ODD) as error:
                importing.turn_down(error, origin, line)
                continue
            importing.origins.append(origin)
            yield row


def row_of_line(line: bytes, importing: Importing) -> RolloutRow:
    """The rollouts row of a NeMo Gym row. Raises BadItem, or one of ``ODD``."""
    return _row(read_any(line, of_failures=False), line, importing)


def _row(row: Row | Attempt | BadRow, line: bytes, importing: Importing) -> RolloutRow:
    """The rollouts row. Raises BadItem, or one of ``ODD``."""
    if isinstance(row, BadRow):
        raise row
    if isinstance(row, Attempt):
        return _failed(row, importing)
    if row.failure is None:
        score(row.reward, "reward")
    try:
        turn_of, turns = _turns(row, importing)
    except BadItem:
        if row.failure is None or row.failure.is_rollout:
            raise
        return _failed(Attempt(decode(line, exact=True), row.failure), importing)
    group, index = importing.numbering.of_content(line.strip(), row.group, row.given)
    if _own_index(row) is not None:
        group = row.group or group  # as gymdata wrote it, whatever the prompts of the group are
    rollout = _rollout(row, turn_of, importing.run_id, group, index) | turns
    if row.failure is not None:
        rollout = without_reward(rollout, row.failure)
    return rollout


def _failed(attempt: Attempt, importing: Importing) -> RolloutRow:
    """The row of a failed attempt whose response is not read."""
    row = without_reward(unread_row(attempt.value, importing), attempt.failure)
    return row | {"rollout_index": _index(attempt.value, row["rollout_index"]), "task": encode(attempt.value).decode()}


def _index(value: JsonObject, index: int) -> int:
    """The index that NeMo Gym gave the rollout, which a failed attempt and its retry share; else ``index``."""
    of_gym = value.get("_ng_rollout_index")
    return of_gym if type(of_gym) is int and 0 <= of_gym < 2**31 else index


def _own_index(row: Row) -> int | None:
    """The index of a row that gymdata wrote; None of any other row."""
    index = object_of(row.value.get("gymdata")).get("rollout_index")
    return index if row.rollout_id and type(index) is int and 0 <= index < 2**31 else None


def _turns(row: Row, importing: Importing) -> tuple[dict[int, int], dict[str, Any]]:
    """The calls with a prompt and a generation as turns: the turn that each model call became, and the columns of the turns.
    Raises BadItem for ids beyond 32 bits, a call whose ids are missing where others have them, and a wrong number of
    log-probabilities."""
    _check_ids(row, importing)
    numbered = {n: call for n, call in enumerate(row.calls) if call is not None and call.is_whole}
    calls = list(numbered.values())
    turn_of = {number: turn for turn, number in enumerate(numbered)}
    if not calls:
        return turn_of, TurnEncoder().columns() | {"finish_reason": None}
    is_cut = calls[-1] is row.calls[-1] and _status(row)[0] == "truncated"
    encoder, before = TurnEncoder(), None
    for number, call in numbered.items():
        prompt, continues = call.after(before)
        for ids in (prompt, call.generation):
            _refuse_wide(ids, number)
        reason = "length" if is_cut and call is calls[-1] else "stop"
        log_probs, rendered = _log_probs(call, number), call.rendered or None
        turn = encoding.Call(prompt, call.generation, log_probs, reason, rendered=rendered)
        encoder.add(turn, continues=continues)
        before = call
    return turn_of, encoder.columns() | {"finish_reason": reason}


def _check_ids(row: Row, importing: Importing) -> None:
    """Raises BadItem as ``Importing.check_ids``."""
    calls = list[CallIds]()
    writing = {entry.turn for entry in row.entries if entry.says or entry.calls}
    for number, call in enumerate(row.calls):
        if call is None:
            calls.append(CallIds(None, f"turn {number}: the model call has no ids", number in writing))
        else:
            lost = GENERATION if len(call.prompt) else PROMPT
            calls.append(CallIds(call.is_whole, f"turn {number}: {lost} missing, null or empty", number in writing))
    importing.check_ids(calls, "response.output", is_own=isinstance(row.value.get("gymdata"), dict))


def _log_probs(call: Call, turn: int) -> npt.NDArray[np.float32]:
    """One for each generated id, all NaN where none are given. Raises BadRow for another number of them: it is not known
    which belongs to which."""
    if call.log_probs is None:
        return np.full(len(call.generation), np.nan, np.float32)
    if len(call.log_probs) != len(call.generation):
        expected, got = str(len(call.generation)), str(len(call.log_probs))
        raise BadRow("L301", f"{LOG_PROBS}: one per generated token, or null", turn=turn, expected=expected, got=got)
    with np.errstate(over="ignore"):  # beyond float32 they are infinite, which is L302
        return call.log_probs.astype(np.float32)


def _refuse_wide(ids: npt.NDArray[Any], call: int) -> None:
    """Raises BadRow for an id of more than 32 bits."""
    if ids.dtype != np.int32:
        k = int(np.flatnonzero(ids != ids.astype(np.int32))[0])
        raise BadRow("S102", "token ids", turn=call, position=k, expected="a 32-bit integer", got=str(int(ids[k])))


def _rollout(row: Row, turn_of: dict[int, int], run: str, group: str, index: int) -> RolloutRow:
    """The columns but those of the turns. ``turn_of``: the turn that each model call became."""
    value = row.value
    response = value["response"]
    params = object_of(value.get("responses_create_params"))
    model = str(response.get("model") or params.get("model") or "unknown")
    status, why = _status(row)
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
        "reward": row.reward,
        "rewards": [{"name": name, "value": part} for name, part in object_of(own.get("rewards")).items()],
        "temperature": float(temperature) if type(temperature) in (int, float) and 0 <= temperature < 1e9 else 1.0,
        "messages": list(messages_of(params.get("input"), row.output, turn_of)),
        "tools": row_tools(value),
        "task": encode({k: v for k, v in value.items() if k not in ("response", "reward")}).decode(),
        "extra": encode({RESPONSE: {k: v for k, v in response.items() if k != "output"}}).decode(),
        "started_at": datetime.fromtimestamp(seconds if has_time else 0, UTC).isoformat(),
        **neutral,
        **{name: own[name] for name, value in neutral.items() if type(own.get(name)) is type(value)},
    }


def _status(row: Row) -> tuple[str, str | None]:
    response = row.value["response"]
    details = response.get("incomplete_details")
    written = next((item for _, item in reversed(row.output) if written_by_model(item)), {})
    if response.get("status") == "incomplete" or details or written.get("status") == "incomplete":
        reason = details.get("reason") if hasattr(details, "get") else None
        return "truncated", str(reason) if reason else "incomplete"
    return "completed", None
