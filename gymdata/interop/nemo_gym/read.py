"""NeMo Gym rows as rows of the rollouts table, with their token evidence.

Invariants: ids are taken over exactly, and log-probabilities as float32; a call without ids gives no turn (one that
lacks only its prompt gets it from a ``PromptRebuilder`` where one is given, and ``extra`` names that turn); what has
no column is kept in ``task`` and ``extra`` so that the row can be written again, token lists only where no turn holds them;
a row that cannot be imported is named, and never hides another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from gymdata.interop.importing import (
    ODD,
    Check,
    Numbering,
    Reject,
    Unnumbered,
    reason_of,
    rollout_id_of,
    run_id_of,
    turn_down,
)
from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.interop.nemo_gym.cut import MESSAGE_FIELDS, Cut, cut
from gymdata.interop.nemo_gym.rebuild import MARK, RENDERED, Outcome, PromptRebuilder
from gymdata.rollouts.messages import (
    STRICT,
    TOKEN_KEYS,
    chat_tools,
    holds_ids,
    messages_of,
    object_of,
    parsed,
    walk,
    written_by_model,
)
from gymdata.rollouts.ragged import Columns
from gymdata.rollouts.turns import Call, TurnEncoder, continuing
from gymdata.store.journal import python_value
from gymdata.store.lines import iter_lines
from gymdata.store.paths import Source

#: A mark besides the letters of the lists that a turn holds: its log-probabilities had more digits than float32.
ROUNDED = "~"
#: Where ``task`` and ``extra`` keep JSON that strict readers refuse (NaN), as text.
AS_TEXT = "nemo_gym_text"
#: Exceptions by which simdjson refuses a line; Python's reader then names the fault.
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)


def table_rows(
    sources: list[Source],
    *,
    run_id: str | None = None,
    reject: Reject | None = None,
    rebuild: PromptRebuilder | None = None,
    check: Check | None = None,
    numbering: Numbering | Unnumbered | None = None,
    columns: bool = False,
) -> Iterator[dict[str, Any]]:
    """The rollouts rows of NeMo Gym files, as the store turns them into columns: turns with numpy arrays, times as text.

    ``run_id`` defaults to a hash of the file names. Rows of one prompt (or of one ``task_id``) are a group. A log-prob
    that the source lacks is NaN. ``rebuild`` makes the prompts that calls with generations lack. With ``reject`` bad
    rows, and those that ``check`` refuses, are given to it and skipped; without it they raise DataError. ``numbering``
    gives rows their indices. With ``columns`` messages and turns may be ``Columns``, which only ``store.columns.build``
    takes.
    """
    run = run_id or run_id_of(sources)
    numbering = numbering or Numbering()
    read = _Reader(rebuild, columns)
    for source in sources:
        for number, line in iter_lines(source):
            try:
                found = read(line)
                # Numbered before the check, so that rollouts are numbered alike with and without it.
                made = _rollout(found, run, *numbering.place(line.strip(), found.row.group))
                if check is not None:
                    check(made)
            except (nemo_rows.BadRow, *ODD) as error:
                bad = error if isinstance(error, nemo_rows.BadRow) else nemo_rows.BadRow("S102", reason_of(error))
                turn_down(bad.code, _reason(bad), source, number, line, reject, "a NeMo Gym rollout", error)
                continue
            if rebuild is not None:
                rebuild.note(source.path, number, made["rollout_id"], found.outcome)
            yield made


def _reason(bad: nemo_rows.BadRow) -> str:
    places = [f"{name} {bad.more[name]}" for name in ("turn", "position") if bad.more.get(name) is not None]
    wanted = f"expected {bad.more['expected']}" if bad.more.get("expected") else ""
    got = f"got {bad.more['got']}" if bad.more.get("got") else ""
    return "; ".join(part for part in (bad.detail, ", ".join(places), wanted, got) if part)


@dataclass(slots=True)
class _Parsed:
    """A row: what checks need of it, and its Python value without the token lists that become turns."""

    row: nemo_rows.Row
    value: dict[str, Any]
    messages: list[dict[str, Any]] | Columns
    turns: Sequence[Mapping[str, Any]] | Columns
    finish_reason: str | None
    n_breaks: int
    n_context_tokens: int
    n_generated_tokens: int
    #: For each turn: where its item is in the output (nested lists give several indices), and which lists it held.
    places: list[list[Any]]
    #: Turns whose prompt was rebuilt, now or before.
    rebuilt: list[int]
    outcome: Outcome
    #: Whether orjson writes the value as Python's json does.
    plain: bool = False


class _Reader:
    """Parses lines: by simdjson straight into buffers, and by Python's json what that refuses."""

    def __init__(self, rebuild: PromptRebuilder | None = None, columns: bool = False) -> None:
        self._rebuild, self._columns = rebuild, columns
        self._read = nemo_rows.RowReader()
        self._parser = nemo_rows.fast_parser()

    def __call__(self, line: bytes) -> _Parsed:
        """Raises BadRow."""
        if self._parser is not None:
            found_fast = cut(line, self._parser)
            if found_fast is not None and (made := _of_cut(found_fast, self._columns)) is not None:
                return made
        try:
            if found := self._read.document(line):
                return _parsed(*found, python_value, self._fill(found[0], line))
        except (*_REFUSALS, nemo_rows.BadRow):
            pass
        row = nemo_rows.slow(line)
        try:
            return _parsed(row, nemo_rows.load(line), _same, self._fill(row, line))
        except RecursionError as error:
            raise nemo_rows.BadRow("S101", "nested too deeply") from error

    def _fill(self, row: nemo_rows.Row, line: bytes) -> Outcome:
        return self._rebuild.fill(row, line) if self._rebuild is not None else Outcome()


def _same(value: Any) -> Any:
    return value


def _parsed(row: nemo_rows.Row, document: Any, plain: Callable[[Any], Any], outcome: Outcome) -> _Parsed:
    encoder, turn_of, moved = _turns(row, document["response"])
    value = {key: plain(document[key]) for key in document if key != "response"}
    given = document["response"]
    response = {key: plain(given[key]) for key in given if key != "output"}
    strip = _Strip(plain, moved)
    response["output"] = strip.items(given["output"], [])
    value["response"] = response
    # Keys in the order of the source.
    value = {key: value[key] for key in document}
    value["response"] = {key: response[key] for key in given}
    for turn in strip.rendered:
        encoder.turns[turn]["rendered"] = True
    rebuilt = sorted({*strip.marked, *(turn_of[call] for call in outcome.prompts)})
    # An item whose lists were taken out still ends its call.
    walked = list(walk(response["output"], lambda item: id(item) in strip.held or holds_ids(item)))
    messages = list(messages_of(_given(value), walked, turn_of))
    last = encoder.turns[-1]["finish_reason"] if encoder.turns else None
    counts = encoder.n_breaks, encoder.n_context_tokens, encoder.n_generated_tokens
    return _Parsed(row, value, messages, encoder.turns, last, *counts, strip.places, rebuilt, outcome)


def _of_cut(found: Cut, columns: bool) -> _Parsed | None:
    """None where log-probabilities are beyond float32, or a call has ids twice."""
    given, output = found.log_probs, found.value["response"]["output"]
    with np.errstate(over="ignore"):
        narrow = given.astype(np.float32)
    if not np.isfinite(narrow).all():
        return None
    generation = found.generation.lengths
    rounded = digits_lost(given, narrow, list(accumulate(generation)))
    turns, messages, ended = found.output.turns, found.output.messages, found.output.ended
    given_messages = _given(found.value)
    made: list[dict[str, Any]] | Columns
    if messages is None or not columns:
        held = {id(output[index]) for index in turns}
        walked = list(walk(output, lambda item: id(item) in held))
        calls = [call for call, item in walked if id(item) in held]
        if len(set(calls)) < len(calls):
            return None
        ended = calls[-1] == max(call for call, _ in walked)
        made = list(messages_of(given_messages, walked, {call: turn for turn, call in enumerate(calls)}))
    else:
        before = [tuple(map(message.get, MESSAGE_FIELDS)) for message in messages_of(given_messages, (), {})]
        every = zip(*before, *messages, strict=True)
        made = Columns(len(before) + len(messages), dict(zip(MESSAGE_FIELDS, every, strict=True)))
    reasons = ["stop"] * len(turns)
    if ended and _status(found.value["response"])[0] == "truncated":
        reasons[-1] = "length"
    rendered: list[bool | None] = [output[index].get(RENDERED) is True or None for index in turns]
    encoded = continuing(found.delta, found.generation, narrow, reasons, rendered)
    marked = [turn for turn, index in enumerate(turns) if output[index].get(MARK) is True]
    places = [[index, "pgl" + ROUNDED * lost] for index, lost in zip(turns, rounded, strict=True)]
    counts = 0, len(found.delta.values), len(narrow)
    turn_rows = encoded if columns else encoded.rows()
    return _Parsed(found.row, found.value, made, turn_rows, reasons[-1], *counts, places, marked, Outcome(), plain=True)


def _given(value: Mapping[str, Any]) -> Any:
    return object_of(value.get("responses_create_params")).get("input")


class _Strip:
    """Takes out of items the token lists that a turn holds, and notes where they were."""

    def __init__(self, plain: Callable[[Any], Any], moved: list[str]) -> None:
        self._plain, self._moved = plain, moved
        self._call = 0
        self.places: list[list[Any]] = []
        #: Turns that say of themselves that their prompt was rebuilt.
        self.marked: list[int] = []
        #: Turns that say of themselves that their ids were rendered from text.
        self.rendered: list[int] = []
        #: The items, by ``id``, that had ids.
        self.held: set[int] = set()

    def items(self, items: Any, path: list[int]) -> list[Any]:
        made: list[Any] = []
        for index, item in enumerate(items):
            if not hasattr(item, "get"):
                made.append(self.items(item, [*path, index]))
            elif not (written_by_model(item) and holds_ids(item)):
                made.append(self._plain(item))
            else:
                taken = self._moved[self._call]
                self._call += 1
                if taken:
                    for name, turns in ((MARK, self.marked), (RENDERED, self.rendered)):
                        if item.get(name) is True:
                            turns.append(len(self.places))
                    self.places.append([*path, index, taken])
                keys = {name for name, letter in zip(TOKEN_KEYS, "pgl", strict=True) if letter in taken}
                made.append({key: self._plain(item[key]) for key in item if key not in keys})
                self.held.add(id(made[-1]))
        return made


def _turns(row: nemo_rows.Row, response: Any) -> tuple[TurnEncoder, dict[int, int], list[str]]:
    """The encoded turns; for each model call with ids the turn that it became; and for each item with token lists, in
    order, which of them (``p``, ``g``, ``l``) its turn holds, and whether log-probabilities lost digits (``ROUNDED``).
    Raises BadRow for ids beyond 32 bits."""
    encoder = TurnEncoder()
    turn_of: dict[int, int] = {}
    moved: list[str] = []
    cut = _status(response)[0] == "truncated"
    for number, call in enumerate(row.calls):
        if call is None:
            continue
        if not (call[0] and call[1]):
            moved.append("")
            continue
        prompt, generation = (_int32(part, number) for part in call[:2])
        given = np.frombuffer(call[2] or b"", np.float64)
        log_probs = np.full(len(generation), np.nan, np.float32)
        # Too few or too many: it is not known which belongs to which token, so none is used.
        fits = len(given) == len(generation)
        if fits:
            with np.errstate(over="ignore"):
                log_probs = given.astype(np.float32)
            fits = bool((np.isfinite(log_probs) == np.isfinite(given)).all())
        turn_of[number] = len(encoder.turns)
        moved.append(("pgl" + ROUNDED * more_than_float32(given, log_probs)) if fits else "pg")
        last = number == len(row.calls) - 1
        encoder.add(Call(prompt, generation, log_probs, "length" if last and cut else "stop"))
    return encoder, turn_of, moved


def more_than_float32(given: Any, kept: Any) -> bool:
    """Whether any of ``given`` (float64) has more digits than ``kept``, the same as float32, keeps: float32
    distinguishes decimals of up to nine digits, and a number that is a float32 already loses nothing, however it is
    written."""
    return digits_lost(given, kept, [len(given)])[0]


def digits_lost(given: Any, kept: Any, ends: list[int]) -> list[bool]:
    """The same of each list of numbers: the lists follow each other and end at ``ends``."""
    starts = [0, *ends[:-1]]
    if (
        len(given)
        and all(a < b for a, b in zip(starts, ends, strict=True))
        and all(map(_clearly_lost, given[starts].tolist(), kept[starts].tolist()))
    ):
        # When numbers have all their digits, one of each list shows it.
        return [True] * len(ends)
    lost = _lost(given, kept)
    return [bool(lost[a:b].any()) for a, b in zip(starts, ends, strict=True)]


def _clearly_lost(number: float, kept: float) -> bool:
    """Whether ``_lost`` is true of one number, with room for rounding; it is slow where there are few."""
    size = abs(number)
    if number == kept or not 1e-30 < size < 1e30:
        return False
    nine = 10.0 ** (8 - math.floor(math.log10(size)))
    return abs(round(size * nine) / nine - size) > 1e-12 * size


def _lost(given: Any, kept: Any) -> Any:
    numbers = kept.astype(np.float64)
    lost = (given != numbers) & np.isfinite(given)
    numbers = given[lost]
    with np.errstate(all="ignore"):
        nine = 10.0 ** (8 - np.floor(np.log10(np.abs(numbers))))
        apart = np.abs(np.round(numbers * nine) / nine - numbers)
    # The product and the quotient are rounded, too. Numbers too small for nine digits (NaN here) are lost as a whole.
    lost[lost] = ~(apart <= 1e-13 * np.abs(numbers))
    return lost


def _int32(data: bytes, call: int) -> Any:
    wide = np.frombuffer(data, np.int64)
    ids = wide.astype(np.int32)
    if not (ids == wide).all():
        at = int(np.flatnonzero(ids != wide)[0])
        raise nemo_rows.BadRow(
            "S102", "token ids", turn=call, position=at, expected="a 32-bit integer", got=str(int(wide[at]))
        )
    return ids


def _rollout(parsed: _Parsed, run: str, group: str, index: int) -> dict[str, Any]:
    row, value = parsed.row, parsed.value
    response = value["response"]
    params = object_of(value.get("responses_create_params"))
    model = str(response.get("model") or params.get("model") or "unknown")
    status, why = _status(response)
    temperature: Any = params.get("temperature")
    kept: dict[str, Any] = {"keys": list(value), "response": response, "turns": parsed.places}
    if "reward" in value and type(value["reward"]) is not float:
        # 1 and 1.0 are equal, but have different texts.
        kept["reward"] = value["reward"]
    return {
        "rollout_id": row.rollout_id or rollout_id_of(run, group, index),
        "run_id": run,
        "task_id": group,
        "group_id": group,
        "rollout_index": index,
        "policy": model,
        "policy_hash": f"served:{model}",
        "policy_version": 0,
        "status": status,
        "stop_reason": why,
        "finish_reason": parsed.finish_reason,
        "reward": row.reward,
        "rewards": [],
        "temperature": float(temperature) if type(temperature) in (int, float) and 0 <= temperature < 1e9 else 1.0,
        "n_turns": len(parsed.turns),
        "n_breaks": parsed.n_breaks,
        "n_context_tokens": parsed.n_context_tokens,
        "n_generated_tokens": parsed.n_generated_tokens,
        "messages": parsed.messages,
        "tools": chat_tools(params.get("tools")),
        "task": _kept({k: v for k, v in value.items() if k not in ("response", "reward")}, None, plain=parsed.plain),
        "extra": _kept(
            kept, "nemo_gym", {"prompts_rebuilt": parsed.rebuilt} if parsed.rebuilt else {}, plain=parsed.plain
        ),
        "turns": parsed.turns,
        "started_at": _time(response.get("created_at")).isoformat(),
        "duration_s": 0.0,
    }


def _kept(value: dict[str, Any], name: str | None, beside: Mapping[str, Any] = {}, *, plain: bool = False) -> str:
    """The text of ``value``; ``plain``: orjson can write it. The same value has the same text however it was read."""
    whole = {name: value, **beside} if name else value
    if not plain:
        try:
            text = STRICT.encode(whole)
        except ValueError:
            return json.dumps({AS_TEXT: json.dumps(value, ensure_ascii=False), **beside}, ensure_ascii=False)
    try:
        return orjson.dumps(whole).decode()
    except TypeError:
        # Whole numbers of more than 64 bits.
        return text


def _status(response: Any) -> tuple[str, str | None]:
    details = response.get("incomplete_details")
    if response.get("status") == "incomplete" or details:
        reason = details.get("reason") if hasattr(details, "get") else None
        return "truncated", str(reason) if reason else "incomplete"
    return "completed", None


def _time(seconds: Any) -> datetime:
    known = type(seconds) in (int, float) and 0 <= seconds < 2**34
    return datetime.fromtimestamp(seconds if known else 0, UTC)


def kept_rows(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool] | None:
    """The fields of its source that an imported row keeps in ``task`` and ``extra``, and whether orjson can write it;
    None for a row that came from elsewhere."""
    extra, plain = parsed(row["extra"] or "{}")
    if AS_TEXT in extra:
        kept, plain = parsed(extra[AS_TEXT])
    else:
        kept = extra.get("nemo_gym")
    if not isinstance(kept, dict) or "fixed" in extra or len(kept.get("turns", ())) != len(row["turns"]):
        return None
    task, strict = parsed(row["task"] or "{}")
    if AS_TEXT in task:
        task, strict = parsed(task[AS_TEXT])
    return kept, task, plain and strict
