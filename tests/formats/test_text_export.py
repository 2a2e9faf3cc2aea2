"""Lines of messages for other trainers say what the rows say, and what is lost of them is counted."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.errors import DataError
from gymdata.formats import format_named
from gymdata.formats.conversion.exporting import Export
from gymdata.formats.text import export as text_export
from gymdata.formats.text.export import COLUMNS
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import build, to_rows
from tests.rollout_files import rollout, write_run

OPENAI_ROLES = {"system", "user", "assistant", "tool", "function", "developer"}
#: What JSON escapes, what other writers escape, and characters of one to four bytes.
text = st.text(
    st.one_of(st.sampled_from('"\\/\b\f\n\r\t\0\x1f\x7f{},:[]\u2028\ufeff\U0001f600é'), st.characters(codec="utf-8")),
    max_size=8,
)
number = st.one_of(st.integers(-(2**70), 2**70), st.floats())
arguments = st.one_of(st.none(), text, number, st.dictionaries(text, st.one_of(number, st.lists(text)), max_size=2))
call = st.fixed_dictionaries(
    {"id": text}, optional={"function": st.one_of(st.none(), st.fixed_dictionaries({"arguments": arguments}))}
)
#: Compact, as Python writes it, and with every other character as an escape.
spelling = st.sampled_from([{"separators": (",", ":"), "ensure_ascii": False}, {"ensure_ascii": False}, {}])
json_lists = st.builds(lambda value, how: json.dumps(value, **how), st.lists(call, max_size=3), spelling)
odd_lists = st.sampled_from(["", '[{"a": "\\u0000"}]', '[{"id": 1e999}]', "[{} ,\t{}]", '[{"a":1,"a":2}]'])
message = st.fixed_dictionaries(
    {"role": st.one_of(st.sampled_from(["user", "assistant", "tool", "a"]), text), "content": st.none() | text},
    optional={
        "reasoning": st.none() | text,
        "tool_calls": st.one_of(st.none(), json_lists, odd_lists),
        "tool_call_id": st.none() | text,
        "name": st.none() | text,
        "turn": st.none() | st.just(0),
        "extra": st.sampled_from(["{}", '{"weight": 0}', '{"weight": 1}', "no JSON"]),
    },
)
chat = st.lists(message, max_size=4)
tools = st.sampled_from(["[]", '[{"type": "function"}]', '[{"é": [1e999, 12345678901234567890123]}]'])
known_reward = st.none() | st.just(1.5)


def spelled(value: Any) -> Any:
    """Non-finite numbers as their names."""
    if isinstance(value, dict):
        return {key: spelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spelled(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def listed(column: str | None) -> list[Any]:
    """The list in a JSON column; empty without one."""
    listed: list[Any] = spelled(json.loads(column or "[]"))
    return listed


def written(message: dict[str, Any], *, openai: bool = False) -> dict[str, Any]:
    """The message in another format."""
    role, calls = message["role"], listed(message.get("tool_calls"))
    made: dict[str, Any] = {"role": "user" if openai and role not in OPENAI_ROLES else role}
    made["content"] = "" if message["content"] is None and not calls else message["content"]
    for one in calls if openai else []:
        if isinstance(one.get("function"), dict) and not isinstance(one["function"].get("arguments"), str):
            value = one["function"].get("arguments")
            one["function"]["arguments"] = json.dumps({} if value is None else value, ensure_ascii=False)
    if calls:
        made["tool_calls"] = calls
    keys = {"tool_call_id": "tool_call_id", "name": "name"} | ({} if openai else {"reasoning": "reasoning_content"})
    made |= {key: message[name] for name, key in keys.items() if message.get(name) is not None}
    return made | ({"weight": 0} if untrained(message) else {})


def untrained(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("extra") == '{"weight": 0}'


def lines_of(name: str, batch: pa.RecordBatch, lost: Counter[str]) -> list[Any]:
    """The values of the lines that a format writes of a batch."""
    written = [format_named(name).write(row, lost) for row in to_rows(batch)]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written if line is not None)
    return [json.loads(line) for line in written if line is not None]


def sampled(messages: list[dict[str, Any]]) -> bool:
    return any(m.get("tool_calls") and m.get("turn") == 0 for m in messages)


def batch_of(chats: list[Any], tool_texts: list[str], rewards: list[float | None]) -> pa.RecordBatch:
    rows = [
        rollout("t", n, reward, [([1], [2])] if reward else [], messages=messages, tools=texts)
        for n, (messages, texts, reward) in enumerate(zip(chats, tool_texts, rewards, strict=True))
    ]
    return build(rows, ROLLOUTS, COLUMNS, "", range(len(rows)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(chat, tools, known_reward), min_size=1, max_size=5))
@example([([{"role": "assistant", "content": "é"}], "[]", None), ([{"role": "user", "content": "x"}], "[]", 1.5)])
def test_conversations_are_those_of_their_rows(rows: list[tuple[Any, str, float | None]]) -> None:
    """Each row has its messages in each format, and what is lost of them is counted."""
    chats, tool_texts, rewards = map(list, zip(*rows, strict=True))
    batch = batch_of(chats, tool_texts, rewards)
    with_turns = sum(reward is not None for reward in rewards)
    for name in ("trl-messages", "trl-prompt-completion", "openai"):
        lost: Counter[str] = Counter()
        made = lines_of(name, batch, lost)
        expected: list[dict[str, Any]] = []
        for messages, texts in zip(chats, tool_texts, strict=True):
            shown = [written(m, openai=name == "openai") for m in messages]
            first = next((n for n, m in enumerate(messages) if m["role"] == "assistant"), None)
            if first is not None:
                row = {"messages": shown}
                if name == "trl-prompt-completion":
                    row = {"prompt": shown[:first], "completion": shown[first:]}
                expected.append(row | ({"tools": listed(texts)} if listed(texts) else {}))
        assert made == expected
        every = [m for messages in chats for m in messages]
        assert +lost == +Counter({
            **dict.fromkeys((text_export.IDS, text_export.LOG_PROBS, text_export.ENDS), with_turns),
            text_export.CALL_TEXT: sum(map(sampled, chats)),
            text_export.EMPTY: len(chats) - len(expected),
            text_export.REASONING: sum(m.get("reasoning") is not None for m in every) * (name == "openai"),
            text_export.UNTRAINED: sum(map(untrained, every)) * (name != "openai"),
            text_export.ROLES: sum(m["role"] not in OPENAI_ROLES for m in every) * (name == "openai"),
        })  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(chat, chat, chat, tools, st.sampled_from([math.nan, math.inf, 0.1, 2.0])), min_size=1, max_size=4
    )
)
def test_preferences_are_those_of_their_rows(rows: list[Any]) -> None:
    """Prompt, chosen and rejected of each pair, any of them empty; no margin where none is known."""
    none: dict[str, Any] = {
        field.name: {pa.string(): "", pa.list_(pa.int32()): []}.get(field.type) for field in PAIRS.schema
    }
    pairs, expected = [], []
    for prompt, chosen, rejected, texts, margin in rows:
        numbers = {"margin": margin, "weight": 1.0, "policy_version": 0, "temperature": 1.0}
        lists: dict[str, Any] = {
            f"{side}_{what}": [] for side in ("chosen", "rejected") for what in ("mask", "logprobs")
        }
        sides = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        pairs.append(none | numbers | lists | sides | {"tools": texts})
        made: dict[str, Any] = {side: [written(m) for m in messages] for side, messages in sides.items()}
        made |= {"tools": listed(texts)} if listed(texts) else {}
        expected.append(made | ({} if math.isnan(margin) else {"margin": spelled(margin)}))
    lost: Counter[str] = Counter()
    batch = build(pairs, PAIRS, PAIRS.schema.names, "", range(len(pairs)))
    assert lines_of("trl-preference", batch, lost) == expected
    assert lost[text_export.CALL_TEXT] == sum(sampled(row[1]) or sampled(row[2]) for row in rows)


@pytest.mark.parametrize("column", ["content", "name"])
def test_text_that_is_not_utf_8_is_refused(column: str) -> None:
    """With its row, also when the two halves of a character are in adjacent messages."""
    kinds = ROLLOUTS.schema.field("messages").type.value_type
    halves = pa.array([b"x", b"\xc3", b"\xa9"], pa.binary()).view(pa.string())
    columns = [
        pa.array(["assistant"] * 3) if f.name == "role" else halves if f.name == column else pa.nulls(3, f.type)
        for f in kinds
    ]
    messages = pa.ListArray.from_arrays(
        pa.array([0, 1, 3], pa.int32()), pa.StructArray.from_arrays(columns, fields=list(kinds))
    )
    batch = batch_of([[{"role": "assistant", "content": "x"}]] * 2, ["[]"] * 2, [None] * 2)
    batch = batch.set_column(batch.schema.get_field_index("messages"), "messages", messages)
    export = Export("run", "trl-messages", ROLLOUTS, None)
    with pytest.raises(ValueError, match="can't decode"):
        list(format_named("trl-messages").convert([batch], export))
    assert export.current == "t-1"


@pytest.mark.parametrize("calls", [r'[{"id": "\ud800"}]', '[{"id":' + "[" * 1000 + "]" * 1000 + "}]", "f(1)"])
def test_calls_that_json_cannot_hold_name_their_row(calls: str, tmp_path: Path) -> None:
    """Text that is not Unicode and values that are nested too deeply are refused with the rollout that has them."""
    rows = [rollout("t", n, 1.0, [([1], [2])]) for n in range(3)]
    rows[1]["messages"][-1]["tool_calls"] = calls
    run = write_run(tmp_path / "run", rows)
    assert len(read_table(run)) == 3
    with pytest.raises(DataError, match="rollout t-1: cannot be written as trl-messages"):
        gymdata.export(run, tmp_path / "out.jsonl", "trl-messages")
    assert not list(tmp_path.glob("out*"))
