"""What the models of published formats share, and gymdata's own rows in trajectories: a trajectory's free object has the row
that it was made of, under ``gymdata``.

Invariants: what is not as its model says is a BadItem with the path of its first fault; a row is taken back exactly where
it and its trajectory are what was written, so what another program changed counts.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import orjson
import pydantic
import xxhash

from gymdata.errors import DataError
from gymdata.formats.conversion.importing import BadItem, CallIds, Importing, has_content
from gymdata.formats.conversion.rows import refuse_surrogates
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, TableRow, json_text, object_of
from gymdata.rollouts.turns import Call, Turn, TurnEncoder
from gymdata.settings import expected_text
from gymdata.store.lines import NON_FINITE, encode

OWN = "gymdata"
#: Beside the columns of the row: a hash of them and of the trajectory.
_DIGEST = "digest"
#: What pydantic has other words for.
_EXPECTED = {"too_short": "at least one item", "too_long": "one item"} | dict.fromkeys(
    ("model_type", "dict_type"), "an object"
)
#: Faults of the shape of an object, not of a value's type.
_OF_SHAPE = ("missing", "literal_error", "string_pattern_mismatch", "too_short")


class Model(pydantic.BaseModel):
    """An object of a published format, as it is read. Fields that are not read are not declared, and are no fault."""

    model_config = pydantic.ConfigDict(strict=True, defer_build=True)  # at first use: help lists all formats


M = TypeVar("M", bound=Model)


def read(model: type[M], value: Any) -> M:
    """``value`` as ``model``. Raises BadItem for its first fault."""
    refuse_surrogates(value)
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
    kind, got = fault["type"], fault["input"]
    path = _path(fault["loc"], value, is_whole=kind == "missing")
    code = "R502" if path == "reward" else "S103" if got is None or not path or kind in _OF_SHAPE else "S102"
    where = f"{path:.120}: " if path else ""
    if kind == "missing":
        raise BadItem(code, f"{where}is missing")
    shown = "null" if got is None else "an empty list" if got == [] else f"{got!r:.60}"
    raise BadItem(code, f"{where}got {shown}, expected {_EXPECTED.get(kind) or expected_text(fault):.80}")


def _path(keys: Sequence[int | str], value: Any, *, is_whole: bool) -> str:
    """The path of a place in ``value``. Keys that are not there are members of a union, except in one that ``is_whole``."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
            value = value[key] if isinstance(value, Sequence) else None
        elif is_whole or key in object_of(value):
            path += f".{key}"
            value = object_of(value).get(key)
    return path.removeprefix(".")


Int32 = Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31)]
#: JSON has names for numbers that are not finite.
Number = Annotated[
    float, pydantic.BeforeValidator(lambda value: NON_FINITE.get(value, value) if isinstance(value, str) else value)
]


_NULL = pydantic.Field(default=None, validate_default=True)
T = TypeVar("T")
#: A list, of which null is the empty one; and an object, of which null is one without fields.
Several = Annotated[list[T], _NULL, pydantic.BeforeValidator(lambda value: [] if value is None else value)]
OrEmpty = Annotated[T, _NULL, pydantic.BeforeValidator(lambda value: {} if value is None else value)]


def only(kind: Any) -> pydantic.BeforeValidator:
    """What is not of ``kind`` has another meaning there, and is null."""
    return pydantic.BeforeValidator(lambda value: value if isinstance(value, kind) else None)


class OwnRow(NamedTuple):
    """The row that gymdata wrote with a trajectory. ``is_whole``: both are still what was written."""

    row: TableRow
    is_whole: bool

    def edited(self, row: RolloutRow) -> RolloutRow:
        """``row``, as the trajectory now says it. While its tokens are those of the own row, it is the same rollout: only
        its messages and its reward may be others."""
        if [turn["digest"] for turn in self.row["turns"]] != [turn["digest"] for turn in row["turns"]]:
            return row
        rewards = self.row["rewards"] if row["reward"] == self.row["reward"] else {}
        return self.row | {"messages": row["messages"], "reward": row["reward"], "rewards": rewards}


def with_own_row(trajectory: JsonObject, free: str, row: TableRow) -> JsonObject:
    """``trajectory`` with the row (as ``to_rows`` gives it) that it was made of in its object ``free``."""
    own = orjson.loads(encode(row))
    whole = trajectory | {free: trajectory[free] | {OWN: own}}
    own[_DIGEST] = _digest(whole)
    return whole


def take_own_row(trajectory: Any, free: str, table_name: str) -> OwnRow | None:
    """Takes the row that gymdata wrote out of a trajectory; None where it has none. Raises BadItem for one that does not fit
    its table."""
    from gymdata.rollouts.schema import TABLES  # loads pyarrow
    from gymdata.store.columns import build, to_rows

    table = TABLES[table_name]
    free_object = object_of(object_of(trajectory).get(free))
    own = object_of(free_object.get(OWN))
    digest = own.pop(_DIGEST, None)
    is_whole = digest is not None and digest == _digest(trajectory)
    free_object.pop(OWN, None)
    if digest is None:
        return None
    try:
        (row,) = to_rows(build([own], table, [name for name in table.schema.names if name in own], "", [0]))
    except DataError as error:
        # The line is reported beside the reason.
        raise BadItem("S102", error.reason) from error
    return OwnRow(row, is_whole)


def _digest(trajectory: JsonObject) -> str:
    """A hash of a JSON value, in which a number that is not finite is its name."""
    try:
        text = json.dumps(trajectory, sort_keys=True, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(trajectory), parse_constant=str), sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def model_call(
    prompt: list[int],
    generation: list[int],
    log_probs: Sequence[float] | None,
    where: str,
    finish_reason: str = "stop",
    **more: Any,
) -> Call:
    """The model call of these lists; without log-probabilities they are NaN. Raises BadItem for another number of them,
    which are at ``where``. ``more``: its other fields."""
    if log_probs is None:
        log_probs = [math.nan] * len(generation)
    if len(log_probs) != len(generation):
        raise BadItem("L301", f"{where}: got {len(log_probs)}, expected {len(generation)}, one per generated token")
    with np.errstate(over="ignore"):
        numbers = np.array(log_probs, np.float32)
    return Call(np.array(prompt, np.int32), np.array(generation, np.int32), numbers, finish_reason, **more)


class Sampled(NamedTuple):
    """A model call as another project wrote it. ``where``: its place in the row; ``prompt``, ``generation``: its ids, empty
    where it has none; ``log_probs``: None where they are not known; ``message``: the one that it wrote; ``more``: the other
    fields of a ``Call`` that are known: its reward, its agent, the sampler's head, the versions of the weights."""

    where: str
    prompt: list[int]
    generation: list[int]
    log_probs: Sequence[float] | None
    message: Message
    more: Mapping[str, Any] = MappingProxyType({})


def turns_of(calls: Sequence[Sampled], importing: Importing, column: str) -> TurnEncoder:
    """The turns of the model calls in a ``column`` of a row; each message gets the number of its turn. Raises BadItem as
    ``Importing.check_ids`` and ``model_call``."""
    whole = [bool(call.prompt and call.generation) for call in calls]
    found = []
    for call, is_whole in zip(calls, whole, strict=True):
        missing = f"{call.where}: ids of its {'generation' if call.prompt else 'prompt'} are missing"
        has_any = call.prompt or call.generation
        found.append(CallIds(is_whole if has_any else None, missing, has_content(call.message)))
    importing.check_ids(found, column)
    encoder = TurnEncoder()
    for call in itertools.compress(calls, whole):
        call.message["turn"] = len(encoder.turns)
        encoder.add(model_call(call.prompt, call.generation, call.log_probs, call.where, **call.more))
    return encoder


def rest_of(trajectory: JsonObject, *parts: str) -> str:
    """What a trajectory says besides ``parts``, as JSON."""
    return json_text({key: value for key, value in trajectory.items() if key not in parts})


def shortest(value: Any) -> float:
    """A float32 as the shortest number that reads back as the same float32."""
    return float(str(np.float32(value)))


def log_probs_of(turn: Turn) -> list[float]:
    return [shortest(value) for value in turn["generation_log_probs"]]
