"""Rollouts of other harnesses become rows with their messages, tools, rewards and task, or are named with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.interop.harness_rows import ANSWER, QUESTION, RESULT, ROWS

CALLS = '[{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 2}"}}]'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


VERIFIERS = ROWS["verifiers"](5)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(messages: Any) -> list[dict[str, Any]]:
    """What messages say: their fields that are not null."""
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def imported(file: Path, tmp_path: Path, name: str) -> list[dict[str, Any]]:
    """Rows of a file whose format is recognised as ``name``, with decoded task, tools and extra."""
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.ok, summary.format) == (True, name)
    rows = to_rows(read_table(tmp_path / "run", ROLLOUTS))
    return [row | {key: json.loads(row[key]) for key in ("task", "tools", "extra")} for row in rows]


def reasons(file: Path, tmp_path: Path, name: str) -> list[str]:
    """Why rows of a file were refused."""
    summary = gymdata.import_rollouts(file, tmp_path / "bad", source=name)
    lines = (tmp_path / "bad" / "rejected.jsonl").read_text().splitlines()
    assert summary.rejected == len(lines)
    return [json.loads(line)["reason"] for line in lines]


def test_results_of_verifiers_keep_calls_tools_metrics_and_task(tmp_path: Path) -> None:
    (row,) = imported(write(tmp_path / "results.jsonl", VERIFIERS), tmp_path, "verifiers")
    assert said(row["messages"]) == [
        QUESTION, {"role": "assistant", "content": "", "reasoning": "Add.", "tool_calls": CALLS}, RESULT, ANSWER,
    ]  # fmt: skip
    assert (row["reward"], row["rewards"], row["tools"]) == (0.75, {"exact": 0.5, "num_turns": 2.0}, TOOLS)
    assert row["task"] == {
        "example_id": 7, "answer": "5", "info": {"level": 1}, "task_id": "7", "messages": [QUESTION],
    }  # fmt: skip
    assert row["extra"]["stop_condition"] == "no_tools_called"


def test_a_failed_rollout_of_verifiers_has_no_reward(tmp_path: Path) -> None:
    failed = VERIFIERS | {"reward": 0.0, "error": {"error": "ModelError"}}
    (row,) = imported(write(tmp_path / "results.jsonl", failed), tmp_path, "verifiers")
    assert (row["reward"], row["rewards"]) == (None, {})


def test_earlier_results_of_verifiers_have_metrics_as_columns_and_texts(tmp_path: Path) -> None:
    rows = [
        {"example_id": n, "prompt": "2+3=", "completion": [{"role": "text", "content": "5"}], "task": "sums",
         "reward": 1.0, "generation_ms": 2.5, "exact": 1.0}
        for n in (0, 0, 1)
    ]  # fmt: skip
    rows[1]["completion"] = "6"
    read = imported(write(tmp_path / "results.jsonl", *rows), tmp_path, "verifiers")
    assert [row["messages"][1]["content"] for row in read] == ["5", "6", "5"]
    assert [(row["group_id"], row["rollout_index"]) for row in read] == [("sums-0", 0), ("sums-0", 1), ("sums-1", 0)]
    assert read[0]["rewards"] == {"exact": 1.0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"completion": None}, "completion: missing"),
        ({"reward": "high"}, "reward: got 'high', expected a number"),
        ({"completion": [QUESTION]}, "no message of the assistant"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "images"),
        ({"completion": [{"role": "assistant", "content": "", "tool_calls": ["{"]}]}, "a tool call that is not JSON"),
    ],
)
def test_a_row_of_verifiers_that_cannot_be_used_is_named(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (named,) = reasons(write(tmp_path / "results.jsonl", VERIFIERS | change), tmp_path, "verifiers")
    assert reason in named
