"""Rollouts of other harnesses become rows with their messages, tools, rewards and task, or are named with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from cli.main import main
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.interop.harness_rows import ANSWER, QUESTION, RESULT, ROWS

CALLS = '[{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 2}"}}]'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


VERIFIERS, COMPLETIONS, VERL, SKYRL = (
    ROWS[name](5) for name in ("verifiers", "trl-completions", "verl-dump", "skyrl-dump")
)
SYSTEM = {"role": "system", "content": "Be brief."}


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


def test_a_rollout_that_a_limit_ended_is_truncated(tmp_path: Path) -> None:
    rows = {"verifiers": VERIFIERS | {"is_truncated": True}, "skyrl-dump": SKYRL | {"stop_reason": "length"}}
    for name, row in rows.items():
        (read,) = imported(write(tmp_path / f"{name}.jsonl", row), tmp_path / name, name)
        assert (read["status"], read["stop_reason"]) == ("truncated", "length")


@pytest.mark.parametrize(
    "prompt", [[QUESTION], "<|im_start|>user\nHow much is 2+3?<|im_end|>\n<|im_start|>assistant\n"]
)
def test_completions_of_trl_are_read_from_its_parquet_with_a_reward_per_function(prompt: Any, tmp_path: Path) -> None:
    rows = [COMPLETIONS | {"prompt": prompt, "completion": "5" if isinstance(prompt, str) else [ANSWER]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00003.parquet")
    (row,) = imported(tmp_path / "completions_00003.parquet", tmp_path, "trl-completions")
    assert said(row["messages"]) == [QUESTION, ANSWER]
    assert (row["reward"], row["rewards"]) == (None, {"exact": 0.5, "length": 2.0})
    assert (row["task"]["source"], row["extra"]) == ("sums", {"step": 3, "advantage": -0.25})


def test_the_one_reward_function_of_a_trl_run_is_its_reward(tmp_path: Path) -> None:
    """A function that does not apply to a row gives it NaN."""
    rows = [{name: value for name, value in COMPLETIONS.items() if name != "length"}]
    rows += [rows[0] | {"exact": math.nan}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00003.parquet")
    read = imported(tmp_path / "completions_00003.parquet", tmp_path, "trl-completions")
    assert [(row["reward"], row["rewards"]) for row in read] == [(0.5, {"exact": 0.5}), (None, {})]


def test_dumps_of_verl_have_the_messages_that_their_text_can_only_mean(tmp_path: Path) -> None:
    rows = [VERL, VERL | {"input": "How much is 2+3?", "acc": math.nan}]
    first, second = imported(write(tmp_path / "4.jsonl", *rows), tmp_path, "verl-dump")
    assert said(first["messages"]) == [SYSTEM, QUESTION, ANSWER]
    assert (said(second["messages"]), second["rewards"]) == ([QUESTION, ANSWER], {})
    assert (first["reward"], first["rewards"], first["extra"]) == (1.0, {"acc": 1.0}, {"step": 4, "pred": "5"})
    assert first["task"]["ground_truth"] == "5"


def test_dumps_of_skyrl_have_the_turns_of_their_template(tmp_path: Path) -> None:
    """What the prompt begins the answer with is a part of it."""
    turns = "Add.</think>a<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    rows = [SKYRL, SKYRL | {"output_response": turns}]
    first, second = imported(write(tmp_path / "sums.jsonl", *rows), tmp_path, "skyrl-dump")
    assert said(first["messages"]) == [QUESTION, {"role": "assistant", "content": "<think>\nAdd.</think>5"}]
    assert (first["reward"], first["task"]["env_extras"]) == (0.75, SKYRL["env_extras"])
    assert said(second["messages"])[2:] == [{"role": "user", "content": "Again."}, ANSWER]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("verifiers", {"completion": None}, "completion: missing"),
        ("verifiers", {"reward": "high"}, "reward: got 'high', expected a number"),
        ("verifiers", {"completion": [QUESTION]}, "no message of the assistant"),
        ("verifiers", {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "images"),
        ("verifiers", {"completion": [ANSWER | {"tool_calls": ["{"]}]}, "a tool call that is not JSON"),
        ("trl-completions", {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "images and audio"),
        ("trl-completions", {"completion": [QUESTION]}, "completion[0].role: got 'user'"),
        ("verl-dump", {"output": "a\nuser\nb\nassistant\n5"}, "input: got text without the special tokens"),
        ("verl-dump", {"input": "user\nassistant\nuser\n2+3?\nassistant\n"}, "of which messages are not sure"),
        ("verl-dump", {"score": "high"}, "score: got 'high', expected a number"),
        ("verl-dump", {"output": 5}, "output: got number, expected text"),
        ("verl-dump", {"input": "<s>[INST] 2+3? [/INST]"}, "a chat template that is not known"),
        ("skyrl-dump", {"output_response": "5<|im_end|>\nuser"}, "'user' between messages"),
        ("skyrl-dump", {"image_paths": ["1.png"]}, "image_paths: images"),
        ("skyrl-dump", {"score": [0.5, None]}, "score: got [0.5, None]"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(name: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (named,) = reasons(write(tmp_path / "rows.jsonl", ROWS[name](5) | change), tmp_path, name)
    assert reason in named


@pytest.mark.parametrize("name", ROWS)
def test_many_rows_with_one_cause_are_one_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS[name](5), *([ROWS[name](5) | {"images": ["1.png"]}] * 9)]
    file = write(tmp_path / "rows.jsonl", *rows)
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.count("rejected") == 2  # how many, and the file that names them
    assert all("images: images" in reason for reason in reasons(file, tmp_path, name))
