"""Rollouts as hypothesis draws them, rows of other harnesses, and files of trajectories, read and written for tests."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

import gymdata
from gymdata.commands.import_export.summaries import ImportSummary
from gymdata.formats import format_named
from gymdata.formats.conversion.importing import Importing, Numbering
from gymdata.rollouts.messages import ROLES
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.store import read_table
from gymdata.store.columns import build, content_hashes, to_rows
from gymdata.store.paths import Source
from tests.rollout_files import rollout

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
number = st.one_of(st.integers(-(2**70), 2**70), st.floats(width=32))
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


def write(path: Path, *rows: Any) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines; none of a file that is not there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n") if line]


def imported(file: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The rows of a file, which is recognised as of the format ``name``; none is rejected."""
    summary = gymdata.import_rollouts(file, file.with_name(f"run of {file.name} file"))
    assert summary.ok, summary.to_dict()
    assert name in (None, summary.format)
    return to_rows(read_table(Path(summary.run), PAIRS if summary.pairs else ROLLOUTS))


def rejected(file: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The rows of a file that are rejected, with line, code and reason."""
    summary = gymdata.import_rollouts(file, file.with_name(f"rejected of {file.name} file"), source=name)
    named = lines(Path(summary.run) / "rejected.jsonl")
    assert summary.rejected == len(named)
    return named


def through_a_run(file: Path, name: str) -> tuple[ImportSummary, Any]:
    """The summary of an import, and what an export of it in the same format gives back: lines, or the value of ``.json``."""
    back = file.with_name(f"back{file.suffix}")
    summary = gymdata.import_rollouts(file, file.with_name("run"), source=name, run_id="r", overwrite=True)
    if summary.rows_in == summary.rejected:
        return summary, []
    gymdata.export(summary.run, back, name, overwrite=True)
    return summary, lines(back) if back.suffix == ".jsonl" else json.loads(back.read_text(encoding="utf-8"))


def there_and_back(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a run that ``through_a_run`` made and those of its export, imported again."""
    back = next(file for name in ("back.json", "back.jsonl") if (file := folder / name).exists())
    summary = gymdata.import_rollouts(back, folder / "again", run_id="r", overwrite=True)
    assert summary.rejected == 0
    table = PAIRS if summary.pairs else ROLLOUTS
    first, again = (to_rows(read_table(folder / name, table)) for name in ("run", "again"))
    return first, again


def said(messages: Any) -> list[dict[str, Any]]:
    """What messages say: their fields that are not null."""
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a row; of a long list, of its first four."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def copy_and_last(row: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    """A copy of the row, and what in it holds the value at ``path``."""
    made = copy.deepcopy(row)
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    return made, holder


#: Values that no field expects.
ODD: list[Any] = [
    None, True, 5, -1, 0.5, 2**31, 2**70, float("nan"), -1e308, "", "x", "NaN", "\ud800", "\x1b[2J", "{not json", "human",
    "token_id:5", "2026-W01-1T00:00:00+00:00", [], {}, [[]], [5], [[5, ["x"]], {}], [None], {"a": None},
]  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, line: bytes) -> bytes:
    """A line with a value changed, taken out or nested deeply, or with its bytes cut, repeated or changed."""
    if draw(st.booleans()):
        at = draw(st.integers(1, len(line) - 2))
        to = draw(st.integers(at, min(at + 20, len(line) - 1)))
        new = draw(st.sampled_from([b"", line[at:to] * 2, b"\xff", b"\x00", b'"', b"[", b"}", b"NaN", b"\\ud800"]))
        return line[:at] + new + line[to:]
    row = json.loads(line)
    path = draw(st.sampled_from(sorted(places(row), key=str)))
    made, holder = copy_and_last(row, path)
    if draw(st.booleans()) and isinstance(holder, dict):
        del holder[path[-1]]
        return json.dumps(made).encode()
    holder[path[-1]] = draw(st.sampled_from([*ODD, "@deep@", "@huge@"]))
    depth = draw(st.sampled_from([100, 500, 1500]))
    return json.dumps(made).replace('"@deep@"', "[" * depth + "]" * depth).replace('"@huge@"', "1e400").encode()


def mutated(line: bytes) -> st.SearchStrategy[bytes]:
    """``changed`` lines that are one row each."""
    return changed(line).filter(_one_row)


def _one_row(line: bytes) -> bool:
    """Not a list or collection, which is several rows, and no blank line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return b"\n" not in line and bool(line.strip())
    return not isinstance(value, list) and not (isinstance(value, dict) and "trajectories" in value)


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
    span = {"version": "s1", "start": 0, "end": len(generation)}
    return Call(
        np.array(prompt, np.int32), np.array(generation, np.int32), np.array(log_probs, np.float32),
        draw(st.sampled_from(["stop", "length"])), draw(st.none() | text), draw(st.none() | st.floats(-2, 2)), top,
        server=draw(st.sampled_from([None, "http://a:1"])), weight_versions=draw(st.sampled_from([None, [span]])),
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


QUESTION = {"role": "user", "content": "How much is 2+3?"}
ANSWER = {"role": "assistant", "content": "5"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
#: A call of a tool, and the tools, as the columns of a rollout have them.
CALLS = '[{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 2}"}}]'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


def verifiers(n: int) -> dict[str, Any]:
    called = {
        "role": "assistant", "content": "", "reasoning_content": "Add.",
        "tool_calls": ['{"id": "c1", "name": "add", "arguments": "{\\"a\\": 2}"}'],
    }  # fmt: skip
    return {
        "example_id": 7, "prompt": [QUESTION], "completion": [called, RESULT, ANSWER | {"content": str(n)}],
        "answer": "5", "info": {"level": 1}, "reward": 0.75, "error": None,
        "timing": {"total_ms": 3.0}, "is_completed": True, "is_truncated": False, "stop_condition": "no_tools_called",
        "metrics": {"exact": 0.5, "num_turns": 2.0}, "exact": 0.5, "num_turns": 2.0,
        "tool_defs": [{"name": "add", "description": "Adds.", "parameters": {}}],
    }  # fmt: skip


def trl_completions(n: int) -> dict[str, Any]:
    return {
        "step": 3, "prompt": [QUESTION], "completion": [ANSWER | {"content": str(n)}], "exact": 0.5, "length": 2.0,
        "source": "sums", "advantage": -0.25,
    }  # fmt: skip


def verl_dump(n: int) -> dict[str, Any]:
    return {
        "input": "How much is 2+3?", "output": str(n), "gts": "5", "score": 1.0,
        "step": 4, "acc": True, "pred": "5",
    }  # fmt: skip


def skyrl_dump(n: int) -> dict[str, Any]:
    return {
        "input_prompt": "How much is 2+3?", "output_response": str(n), "score": [0.0, 0.25, 0.5], "stop_reason": "stop",
        "env_class": "sums", "env_extras": {"reward_spec": {"ground_truth": "5"}}, "data_source": "sums/test",
    }  # fmt: skip


def verifiers_traces(n: int) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "name": "add", "arguments": '{"a": 2}'}
    said = [QUESTION, {"role": "assistant", "reasoning_content": "Add.", "tool_calls": [call]}, RESULT]
    nodes = [
        {"message": message, "sampled": message["role"] == "assistant", "timestamp": 1.5, **({"parent": k - 1} if k else {}),
         **({"token_ids": [k, 9], "mask": [False, True], "logprobs": [-0.5]} if message["role"] == "assistant" else
            {"token_ids": [k], "mask": [False], "logprobs": []})}
        for k, message in enumerate([*said, ANSWER | {"content": str(n)}])
    ]  # fmt: skip
    task = {"type": "Sum", "data": {"idx": 7, "answer": "5"}, "key": "sum-7"}
    trace = {
        "version": 1, "id": f"t{n}", "task": task, "agent": {"config": {}, "name": "agent", "trainable": True},
        "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": {}}], "nodes": nodes,
        "calls": [{"node": 1, "model": "m"}], "rewards": {"exact": {"score": 1.0, "weight": 0.5}},
        "metrics": {"turns": 2.0}, "info": {}, "is_completed": True, "ok": True, "errors": [],
    }  # fmt: skip
    return {"id": "e", "env": {"id": "sums"}, "task": task, "ok": True, "errors": [], "traces": [trace]}


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "verifiers": verifiers,
    "verifiers-traces": verifiers_traces,
    "trl-completions": trl_completions,
    "verl-dump": verl_dump,
    "skyrl-dump": skyrl_dump,
}


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


NAT = [{"episode": _said(text), "reward": 1.0} for text in "ab"]


ATIF = [
    {"schema_version": "ATIF-v1.6", "steps": [{"source": "user", "message": "q"}, {"source": "agent", "message": text}]}
    for text in "ab"
]
