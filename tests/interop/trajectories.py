"""Rollouts as hypothesis draws them, and files of trajectories that are read and written for tests."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from gymdata.interop.formats import format_named
from gymdata.interop.importing import Importing, Numbering
from gymdata.rollouts.schema import ROLES, ROLLOUTS
from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.store.columns import build, content_hashes, to_rows
from gymdata.store.paths import Source
from tests.rollout_files import rollout

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
number = st.one_of(st.integers(-5, 2**40), st.floats(width=32))
leaf = st.one_of(st.none(), st.booleans(), number, text)
value = st.recursive(
    leaf, lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(text, inner, max_size=2)), max_leaves=4
)
token = st.integers(0, 2**31 - 1)
log_prob = st.one_of(st.floats(-50, 0, width=32), st.sampled_from([float("nan"), float("-inf")]))
#: Calls as a model writes them, as JSON text that is none, and with arguments that are no object.
calls = st.sampled_from(
    [
        None,
        json.dumps([{"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]),
        '[{"id":"c0","type":"function","function":{"name":"f","arguments":{"a":1.0}}}]',
        json.dumps([{"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{"}}]),
        json.dumps([{"function": {"name": "é"}}, 7]),
        "no json",
        "[]",
    ]
)


def some(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object with some of ``fields`` and a few that nobody knows."""
    known = st.fixed_dictionaries({}, optional=fields)
    return st.builds(lambda more, made: more | made, st.dictionaries(st.sampled_from("uvw"), value, max_size=2), known)


@st.composite
def model_call(draw: st.DrawFn, before: list[int]) -> Call:
    """A call whose prompt goes on from ``before``, or breaks."""
    keep = draw(st.integers(0, len(before)))
    prompt = [*before[: keep if draw(st.booleans()) else len(before)], *draw(st.lists(token, min_size=1, max_size=3))]
    generation = draw(st.lists(token, max_size=3))
    log_probs = [draw(log_prob) for _ in generation]
    top = None
    if generation and draw(st.booleans()):
        top = [
            [{"id": draw(token), "log_prob": float(np.float32(draw(st.floats(-9, 0, width=32))))}] for _ in generation
        ]
    return Call(
        np.array(prompt, np.int32), np.array(generation, np.int32), np.array(log_probs, np.float32),
        draw(st.sampled_from(["stop", "length"])), draw(st.none() | text), draw(st.none() | st.floats(-2, 2)), top,
    )  # fmt: skip


@st.composite
def message(draw: st.DrawFn, role: str, turn: int | None = None) -> dict[str, Any]:
    """A message with any of its fields."""
    optional = {
        "reasoning": draw(st.none() | text),
        "tool_calls": draw(calls),
        "tool_call_id": draw(st.sampled_from([None, "c0", "c9"])),
        "name": draw(st.none() | text),
        "extra": draw(st.sampled_from([None, '{"a": 1}'])),
    }
    return {"role": role, "content": draw(st.none() | text), "turn": turn} | optional


@st.composite
def native(draw: st.DrawFn, reward: st.SearchStrategy[float | None]) -> dict[str, Any]:
    """A rollouts row: every turn has its message, other messages stand anywhere between."""
    encoder, held, messages = TurnEncoder(), [], []
    others = st.sampled_from(ROLES)
    for turn in range(draw(st.integers(0, 3))):
        messages += [draw(message(draw(others))) for _ in range(draw(st.integers(0, 2)))]
        call = draw(model_call(held))
        encoder.add(call)
        held = [*call.prompt_token_ids.tolist(), *call.generation_token_ids.tolist()]
        messages.append(draw(message("assistant", turn)))
    messages += [draw(message(draw(others))) for _ in range(draw(st.integers(0 if messages else 1, 2)))]
    index = draw(st.integers(0, 10**6))
    made = rollout(draw(st.sampled_from("ab")), index, None, [])
    return made | {
        "reward": draw(reward),
        "rewards": [{"name": "part", "value": draw(st.none() | st.floats(allow_nan=False))}],
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0])),
        "messages": messages,
        "tools": draw(st.sampled_from(["[]", '[{"type": "function", "function": {"name": "f"}}]', "odd"])),
        "extra": draw(st.sampled_from(["{}", '{"environment": {"x": 1}}'])),
        "turns": encoder.turns,
        "n_turns": len(encoder.turns),
        "n_breaks": encoder.n_breaks,
        "n_context_tokens": encoder.n_context_tokens,
        "n_generated_tokens": encoder.n_generated_tokens,
    }


def as_spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as the store gives them to a writer, with the hashes of their turns."""
    table = pa.Table.from_pylist(list(rows), schema=ROLLOUTS.arrow)
    for name, hashes in content_hashes(table["turns"]).items():
        table = table.set_column(table.schema.get_field_index(name), ROLLOUTS.arrow.field(name), hashes)
    return to_rows(table)


def as_stored(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that a reader made, through columns and out again, by rollout id."""
    given = list(rows)
    batch = build(given, ROLLOUTS, ROLLOUTS.schema.names, "read", list(range(len(given))))
    return sorted(to_rows(batch), key=lambda row: row["rollout_id"])


def rows_read(name: str, file: Path) -> list[dict[str, Any]]:
    """The rollouts rows of a file in the format ``name``."""
    importing = Importing("run", Numbering())
    return [row for _, row in format_named(name).read([Source(file, "jsonl")], importing)]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values), encoding="utf-8")
    return path


def exported(
    rows: Sequence[dict[str, Any]], write: Callable[..., dict[str, Any] | None]
) -> tuple[list[Any], Counter[str]]:
    """What a writer makes of rows, as JSON reads it, and what it says is lost."""
    lost: Counter[str] = Counter()
    made = [write(row, lost) for row in as_spread(rows)]
    return [through_json(one) for one in made if one is not None], Counter({k: n for k, n in lost.items() if n})


def in_order(theirs: Any) -> Any:
    """The order of keys is no part of JSON."""
    if isinstance(theirs, dict):
        return {key: in_order(theirs[key]) for key in sorted(theirs)}
    return [in_order(one) for one in theirs] if isinstance(theirs, list) else theirs


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN is itself, and a log-probability is a float32."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)
