"""Rollouts of other harnesses keep their tools, rewards, task and facts; what no text of theirs surely says is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gymdata.cli.main import main
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.text.rows import text_of
from tests.formats import trajectories
from tests.formats.trajectories import ANSWER, CALLS, QUESTION, RESULT, ROWS, TOOLS, rejected, said, write

VERIFIERS, COMPLETIONS, VERL, SKYRL = (
    ROWS[name](5) for name in ("verifiers", "trl-completions", "verl-dump", "skyrl-dump")
)


def imported(file: Path, name: str) -> list[dict[str, Any]]:
    """Rows of a file whose format is recognised as ``name``, with decoded task, tools and extra."""
    rows = trajectories.imported(file, name)
    return [row | {key: json.loads(row[key]) for key in ("task", "tools", "extra")} for row in rows]


def of_completions(folder: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of the file that TRL writes."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "completions_00003.parquet")
    return imported(folder / "completions_00003.parquet", "trl-completions")


def test_results_of_verifiers_keep_calls_tools_metrics_and_task(tmp_path: Path) -> None:
    (row,) = imported(write(tmp_path / "results.jsonl", VERIFIERS), "verifiers")
    assert said(row["messages"]) == [
        QUESTION, {"role": "assistant", "content": "", "reasoning": "Add.", "tool_calls": CALLS}, RESULT, ANSWER,
    ]  # fmt: skip
    assert (row["reward"], row["rewards"], row["tools"]) == (0.75, {"exact": 0.5, "num_turns": 2.0}, TOOLS)
    assert row["task"] == {
        "example_id": 7, "answer": "5", "info": {"level": 1}, "task_id": "7", "messages": [QUESTION],
    }  # fmt: skip
    assert row["extra"]["stop_condition"] == "no_tools_called"


@pytest.mark.parametrize("row", [{}, {"trajectory": [{"tokens": {"prompt_ids": [1], "completion_ids": [2]}}]}])
def test_ids_that_are_not_read_are_named(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`import` says which column holds them, where a file has some; a file without has no such sentence."""
    file = write(tmp_path / "results.jsonl", {k: v for k, v in VERIFIERS.items() if k != "trajectory"} | row)
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 0
    assert ("verifiers: token ids in the `trajectory` of 1 row are not read" in capsys.readouterr().err) == bool(row)


def test_earlier_results_of_verifiers_have_metrics_as_columns_and_texts(tmp_path: Path) -> None:
    rows = [
        {"example_id": n, "prompt": "2+3=", "completion": [{"role": "text", "content": "5"}], "task": "sums",
         "reward": 1.0, "generation_ms": 2.5, "exact": 1.0}
        for n in (0, 0, 1)
    ]  # fmt: skip
    rows[1]["completion"] = "6"
    read = imported(write(tmp_path / "results.jsonl", *rows), "verifiers")
    assert [row["messages"][1]["content"] for row in read] == ["5", "6", "5"]
    assert [(row["group_id"], row["rollout_index"]) for row in read] == [("sums-0", 0), ("sums-0", 1), ("sums-1", 0)]
    assert read[0]["rewards"] == {"exact": 1.0}


def test_traces_of_verifiers_are_read_from_episodes_and_alone(tmp_path: Path) -> None:
    episode = ROWS["verifiers-traces"](5)
    (trace,) = episode["traces"]
    rows = [episode, trace]
    first, second = imported(write(tmp_path / "traces.jsonl", *rows), "verifiers-traces")
    assert (first["messages"], first["reward"]) == (second["messages"], second["reward"])
    assert [m["content"] for m in said(first["messages"]) if "content" in m] == ["How much is 2+3?", "5", "5"]
    assert (first["messages"][1]["reasoning"], first["messages"][1]["tool_calls"]) == ("Add.", CALLS)
    assert (first["reward"], first["rewards"], first["tools"]) == (0.5, {"exact": 1.0, "turns": 2.0}, TOOLS)
    assert (first["task"]["answer"], first["group_id"], first["policy"]) == ("5", "sum-7", "m")


def test_a_rollout_that_a_limit_ended_is_truncated(tmp_path: Path) -> None:
    rows = {"verifiers": VERIFIERS | {"is_truncated": True}, "skyrl-dump": SKYRL | {"stop_reason": "length"}}
    for name, row in rows.items():
        (read,) = imported(write(tmp_path / f"{name}.jsonl", row), name)
        assert (read["status"], read["stop_reason"]) == ("truncated", "length")


@pytest.mark.parametrize("prompt", [[QUESTION], QUESTION["content"]])
def test_completions_of_trl_are_read_from_its_parquet_with_a_reward_per_function(prompt: Any, tmp_path: Path) -> None:
    completion = "5" if isinstance(prompt, str) else [ANSWER]
    (row,) = of_completions(tmp_path, COMPLETIONS | {"prompt": prompt, "completion": completion})
    assert said(row["messages"]) == [QUESTION, ANSWER]
    assert (row["reward"], row["rewards"]) == (None, {"exact": 0.5, "length": 2.0})
    assert (row["task"]["source"], row["extra"]) == ("sums", {"step": 3, "advantage": -0.25})


def test_only_where_there_is_one_reward_function_of_trl_it_is_the_reward(tmp_path: Path) -> None:
    """A function that does not apply to a row gives it NaN, which pandas writes as null: it is a function all the same."""
    one = {name: value for name, value in COMPLETIONS.items() if name != "length"}
    read = of_completions(tmp_path, one, one | {"exact": math.nan})
    assert [(row["reward"], row["rewards"]) for row in read] == [(0.5, {"exact": 0.5}), (None, {})]
    (tmp_path / "two").mkdir()
    read = of_completions(tmp_path / "two", COMPLETIONS, COMPLETIONS | {"exact": None})
    assert [row["reward"] for row in read] == [None, None]


def test_dumps_of_verl_are_plain_prompts_with_their_answers(tmp_path: Path) -> None:
    rows = [VERL, VERL | {"acc": math.nan}]
    first, second = imported(write(tmp_path / "4.jsonl", *rows), "verl-dump")
    assert said(first["messages"]) == [QUESTION, ANSWER]
    assert (said(second["messages"]), second["rewards"]) == ([QUESTION, ANSWER], {})
    assert (first["reward"], first["rewards"], first["extra"]) == (1.0, {"acc": 1.0}, {"step": 4, "pred": "5"})
    assert first["task"]["ground_truth"] == "5"


def test_dumps_of_skyrl_have_the_sum_of_their_scores_and_their_task(tmp_path: Path) -> None:
    (row,) = imported(write(tmp_path / "sums.jsonl", SKYRL), "skyrl-dump")
    assert said(row["messages"]) == [QUESTION, ANSWER]
    assert (row["reward"], row["task"]["env_extras"]) == (0.75, SKYRL["env_extras"])


def test_a_part_with_a_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadItem, match="a part of type 'image_url'"):
        text_of([{"type": "image_url", "text": "a cat"}], "content")


def test_many_rows_with_one_cause_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", VERIFIERS, *([VERIFIERS | {"images": ["1.png"]}] * 9))
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.count("rejected") == 2  # how many, and the file that names them
    for name in ROWS.keys() - {"verifiers-traces"}:
        (named,) = rejected(write(tmp_path / f"{name}.jsonl", ROWS[name](5) | {"images": ["1.png"]}), name)
        assert "images: images" in named["reason"]
