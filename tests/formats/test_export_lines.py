"""Lines that are exported: their lists of tokens, values that JSON has not, and files that do not fit on the disk."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.errors import StoreError
from gymdata.rollouts.turns import Call, TurnEncoder, expand_prompts
from tests.formats.trajectories import imported, lines, same
from tests.kills import full_disk
from tests.rollout_files import rollout, two_turns, write_run

_SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
ids = st.lists(st.one_of(st.integers(0, 2), st.integers(0, 2**31 - 1)), max_size=5)
#: Calls of few ids share beginnings, so they continue, branch, break and repeat each other.
calls = st.lists(st.tuples(ids, ids), min_size=1, max_size=5)
log_prob = st.floats(-(2.0**100), 0, width=32)
NAMES = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def shortest(value: Any) -> float | str:
    """The number with the fewest digits that is this float32."""
    return "NaN" if math.isnan(value) else float(str(np.float32(value)))


def exported(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gymdata.export(write_run(folder / "run", rows), folder / "out.jsonl", "nemo-gym", overwrite=True)
    return lines(folder / "out.jsonl")


@_SETTINGS
@given(st.data(), st.lists(calls, min_size=1, max_size=3))
def test_lists_are_those_of_the_turns(tmp_path: Path, data: st.DataObject, rollouts: list[Any]) -> None:
    """Whole prompts, generations and log-probabilities on each item; unknown log-probabilities are "NaN"."""
    rows, expected = [], []
    for number, made in enumerate(rollouts):
        encoder = TurnEncoder()
        for prompt, generation in made:
            size = len(generation)
            known = st.lists(log_prob, min_size=size, max_size=size)
            values = data.draw(st.one_of(known, st.just([math.nan] * size)))
            lists = np.array(prompt, np.int32), np.array(generation, np.int32), np.array(values, np.float32)
            encoder.add(Call(*lists, "stop"))
        base = rollout("t", number, 1.0, made)
        rows.append(base | {"turns": encoder.turns, "n_breaks": encoder.n_breaks})
        expected += [
            [p.tolist(), t["generation_token_ids"].tolist(), [shortest(v) for v in t["generation_log_probs"]]]
            for p, t in zip(expand_prompts(encoder.turns), encoder.turns, strict=True)
        ]
    items = [i for row in exported(tmp_path, rows) for i in row["response"]["output"] if NAMES[0] in i]
    assert same([[item[name] for name in NAMES] for item in items], expected)


def test_times_and_rendered_turns(tmp_path: Path) -> None:
    """A time is the seconds since 1970 as Python's datetime has them; rendered ids have a mark and no log-probabilities."""
    when = datetime(2031, 5, 6, 7, 8, 9, 123457, tzinfo=UTC)
    row = rollout("t", 0, 1.0, [([1, 5], [10, 2])], started_at=when)
    row["turns"][0]["rendered"] = True
    made = exported(tmp_path, [row])[0]
    assert made["response"]["created_at"] == when.timestamp()
    item = made["response"]["output"][0]
    assert (item["generation_token_ids"], item["token_ids_rendered"]) == ([10, 2], True)
    assert "generation_log_probs" not in item


WRITTEN = ["nemo-gym.jsonl", "trl-messages.jsonl", "verl.parquet", "nat-trajectories.json", "nat-trajectories.jsonl"]


@pytest.mark.parametrize("name", [*WRITTEN, "atif.jsonl"])
def test_a_full_disk_is_named_with_the_file_and_what_to_do(tmp_path: Path, name: str) -> None:
    """An export that does not fit says which file could not be written and to free space, and leaves nothing."""
    run = write_run(tmp_path / "run", [rollout("t", i, 1.0, [([1], [i] * 2_000)]) for i in range(4)])
    with full_disk(at=500), pytest.raises(StoreError) as error:
        gymdata.export(run, tmp_path / "out" / name, name.partition(".")[0])
    assert str(error.value).startswith(f"{tmp_path / 'out' / name}: could not be written: ")
    assert "free space and run the same command again" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_repair_that_does_not_fit_names_its_file(tmp_path: Path) -> None:
    """A full disk while rollouts are repaired is said like that of an export."""
    run = write_run(tmp_path / "run", [rollout("t", i, 1.0, [([1], [i] * 2_000)]) for i in range(4)])
    with full_disk(at=500), pytest.raises(StoreError, match=r"fixed.jsonl: could not be written: (.|\n)*free space"):
        gymdata.fix(run, "drop", tmp_path / "fixed.jsonl")


def test_rows_for_nemo_gym_are_what_its_models_take(tmp_path: Path) -> None:
    """A request allows the fields of a function alone and needs all but one of them; a response needs tools, how they may be
    called, ids of calls, and a reason of the Responses shape. Read back, nothing of it is left over."""
    function = {"name": "f", "parameters": {}, "description": "d", "return": {"type": "string"}}
    tools = json.dumps([{"type": "function", "function": function}])
    call = json.dumps([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])
    messages = [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "tool_calls": call, "turn": 0},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42", "turn": 1},
    ]
    ends = {"max_tokens": {"reason": "max_output_tokens"}, "max_turns": None}
    rows = [
        rollout(why, 0, 1.0, two_turns(5, 40), messages=messages, tools=tools, status="truncated", stop_reason=why)
        for why in ends
    ]
    gymdata.export(write_run(tmp_path / "run", rows), tmp_path / "rows.jsonl", "nemo-gym")
    for row, details in zip(lines(tmp_path / "rows.jsonl"), ends.values(), strict=True):
        response, request = row["response"], row["responses_create_params"]
        named = [{"type": "function", "name": "f", "parameters": {}, "description": "d", "strict": False}]
        assert response["tools"] == request["tools"] == named
        assert (response["tool_choice"], response["parallel_tool_calls"]) == ("auto", True)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", details)
        assert [item.get("call_id") for item in response["output"]] == ["call_1_0", "call_1_0", None]
    back = imported(tmp_path / "rows.jsonl", "nemo-gym")
    assert [(json.loads(row["tools"]), row["stop_reason"]) for row in back] == [
        (json.loads(tools), why) for why in ends
    ]
