"""One reading of a NeMo Gym row: validate and import see the same model calls, wherever the ids are put."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.validate.run import validate
from gymdata.errors import DataError
from gymdata.formats.nemo_gym import rows as nemo_rows
from gymdata.formats.nemo_gym.read import table_rows
from gymdata.rollouts.messages import walk
from gymdata.store import resolve
from tests.validate.generate import conversation, write_lines

KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def ids_of(prompt: list[int], generation: list[int]) -> dict[str, Any]:
    return dict(zip(KEYS, (prompt, generation, [-0.5 - k for k in range(len(generation))]), strict=True))


def message(turn: int, **ids: Any) -> dict[str, Any]:
    text = [{"type": "output_text", "text": f"text {turn}", "annotations": []}]
    return {"type": "message", "role": "assistant", "content": text, **ids}


def tool_call(name: str, **ids: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}", **ids}


def answer(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "r"}


def row_of(output: list[Any], name: str = "q") -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": name}], "tools": []}
    return {"responses_create_params": params, "response": {"output": output}, "reward": 1.0}


def on_messages(calls: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """A row as converters write it that put the ids on the message: its function calls follow it, without ids."""
    output: list[Any] = []
    for turn, (prompt, generation) in enumerate(calls):
        output += [{"type": "reasoning", "summary": [{"text": "Hm.", "type": "summary_text"}]}]
        output += [message(turn, **ids_of(prompt, generation))]
        if turn < len(calls) - 1:
            output += [tool_call(f"a{turn}"), tool_call(f"b{turn}"), answer(f"a{turn}"), answer(f"b{turn}")]
    return row_of(output)


def calls_of(turns: int = 3) -> list[tuple[list[int], list[int]]]:
    return conversation(np.random.default_rng(0), turns)


def test_function_calls_after_the_message_with_the_ids_belong_to_it(tmp_path: Path) -> None:
    """A message with ids and the function calls after it are one turn: nothing is missing, and turns count calls."""
    row = on_messages(calls_of())
    report = validate(write_lines(tmp_path / "a.jsonl", [row]))
    assert (report.violations, report.turns) == ([], 3)
    row["response"]["output"][-1]["prompt_token_ids"][1] = 999
    (found,) = validate(write_lines(tmp_path / "b.jsonl", [row])).violations
    assert (found.code, found.turn, found.position) == ("T200", 2, 1)


def test_import_makes_one_message_of_it(tmp_path: Path) -> None:
    """The imported rollout has one assistant message per call, with reasoning, text, calls and turn."""
    (made,) = table_rows(resolve(str(write_lines(tmp_path / "a.jsonl", [on_messages(calls_of(2))]))))
    said = [(m["role"], m.get("turn")) for m in made["messages"]]
    assert said == [("user", None), ("assistant", 0), ("tool", None), ("tool", None), ("assistant", 1)]
    assert (made["messages"][1]["reasoning"], made["messages"][1]["content"]) == ("Hm.", "text 0")
    assert [c["id"] for c in json.loads(made["messages"][1]["tool_calls"])] == ["a0", "b0"]
    assert [m["tool_call_id"] for m in made["messages"][2:4]] == ["a0", "b0"]
    assert made["n_turns"] == 2


def test_empty_id_lists_are_no_ids(tmp_path: Path) -> None:
    """One message whose items all have empty lists is one message and one turn without token data."""
    empty: dict[str, Any] = {key: [] for key in KEYS}
    output = [
        {"type": "reasoning", "summary": [{"text": "Hm.", "type": "summary_text"}], **empty},
        message(0, **empty),
        tool_call("a", **empty),
        answer("a"),
        message(1, **empty),
    ]
    path = write_lines(tmp_path / "a.jsonl", [row_of(output)])
    found = validate(path).violations
    assert [(v.code, v.turn) for v in found] == [("T205", 0), ("T205", 1)]
    (made,) = table_rows(resolve(str(path)))
    assert [m["role"] for m in made["messages"]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("output", "calls"),
    [
        ([message(0, **ids_of([1], [2])), tool_call("a"), message(1, **ids_of([1, 2, 3], [4]))], [0, 0, 1]),
        ([message(0, **ids_of([1], [2])), tool_call("a"), tool_call("b", **ids_of([1, 2, 3], [4]))], [0, 1, 1]),
        (
            [
                message(0, **ids_of([1], [2])),
                tool_call("a"),
                {"type": "reasoning"},
                tool_call("b", **ids_of([1, 2], [4])),
            ],
            [0, 0, 1, 1],
        ),
        ([tool_call("a", **ids_of([1], [2])), tool_call("b")], [0, 1]),
        ([message(0), tool_call("a"), answer("a"), message(1)], [0, 0, 0, 1]),
        ([answer("x"), [message(0, **ids_of([1], [2])), [tool_call("a")]], answer("a")], [-1, 0, 0, 0]),
    ],
)
def test_which_call_an_item_belongs_to(output: list[Any], calls: list[int]) -> None:
    """Calls without ids after a message with ids are its own, unless ids at their end make them a call."""
    assert [call for call, _ in walk(output)] == calls


@pytest.mark.parametrize("ids", [[[1, 2], [1, 2, 3]], [[1, 2], [7]], [None, None]], ids=["continues", "breaks", "text"])
@pytest.mark.parametrize("key", ["input", "temperature", "output", "response", "reward", "content", "type", "a", "b"])
def test_a_key_given_twice_anywhere_is_refused_by_checks_and_by_the_import(key: str, ids: list[Any]) -> None:
    """Parsers differ in which of two values they keep, so that neither is taken, however the line is read."""
    call = {"type": "message", "role": "assistant", "content": "x"}
    calls = [call if p is None else call | dict(zip(KEYS, (p, [3], [-1.0]), strict=True)) for p in ids]
    row = {
        "responses_create_params": {"input": "q", "temperature": 0.5},
        "response": {"output": calls, "metadata": [{"a": {"b": "[1, 2]"}}]},
        "reward": 1.0,
    }
    good = json.dumps(row)
    assert nemo_rows.read_row(good.encode()).reward == 1.0
    at = good.index(f'"{key}": ')
    line = good[:at] + f'"{key}": [], ' + good[at:]
    with pytest.raises(nemo_rows.BadRow, match=f"the key '{key}' is given twice"):
        nemo_rows.read_row(line.encode())
    with tempfile.TemporaryDirectory() as place:
        path = write_lines(Path(place) / "a.jsonl", [good, line])
        assert [(v.code, v.row) for v in validate(path).violations if v.code[0] == "S"] == [("S102", 1)]
        with pytest.raises(DataError, match=f"line 2.*the key '{key}' is given twice"):
            list(table_rows(resolve(str(path))))
