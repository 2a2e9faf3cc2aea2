"""Rollouts of other harnesses keep their tools, rewards, task and facts; what no text of theirs surely says is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.interop.blocks import text_of
from gymdata.interop.importing import BadItem
from gymdata.store import read_table
from tests.interop import trajectories
from tests.interop.published_rows import BLOCKS, OUTCOME, SESSIONS
from tests.interop.trajectories import ANSWER, CALLS, QUESTION, RESULT, ROWS, SYSTEM, TOOLS, rejected, said, write

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
    """`import` and `validate` say which column holds them, where a file has some; a file without has no such sentence."""
    file = write(tmp_path / "results.jsonl", {k: v for k, v in VERIFIERS.items() if k != "trajectory"} | row)
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 0
    assert ("its `trajectory` holds token ids, which are not read" in capsys.readouterr().err) == bool(row)
    assert ("its `trajectory` holds token ids, which are not read" in gymdata.validate(file).next_step) == bool(row)


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


@pytest.mark.parametrize(
    "prompt", [[QUESTION], "<|im_start|>user\nHow much is 2+3?<|im_end|>\n<|im_start|>assistant\n"]
)
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


def test_dumps_of_verl_have_the_messages_that_their_text_can_only_mean(tmp_path: Path) -> None:
    rows = [VERL, VERL | {"input": "How much is 2+3?", "acc": math.nan}]
    first, second = imported(write(tmp_path / "4.jsonl", *rows), "verl-dump")
    assert said(first["messages"]) == [SYSTEM, QUESTION, ANSWER]
    assert (said(second["messages"]), second["rewards"]) == ([QUESTION, ANSWER], {})
    assert (first["reward"], first["rewards"], first["extra"]) == (1.0, {"acc": 1.0}, {"step": 4, "pred": "5"})
    assert first["task"]["ground_truth"] == "5"


def test_dumps_of_skyrl_have_the_turns_of_their_template(tmp_path: Path) -> None:
    """What the prompt begins the answer with is a part of it."""
    turns = "Add.</think>a<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    rows = [SKYRL, SKYRL | {"output_response": turns}]
    first, second = imported(write(tmp_path / "sums.jsonl", *rows), "skyrl-dump")
    assert said(first["messages"]) == [QUESTION, {"role": "assistant", "content": "<think>\nAdd.</think>5"}]
    assert (first["reward"], first["task"]["env_extras"]) == (0.75, SKYRL["env_extras"])
    assert said(second["messages"])[2:] == [{"role": "user", "content": "Again."}, ANSWER]


def test_task_and_facts_of_a_trajectory_are_kept(tmp_path: Path) -> None:
    rows = {}
    for name in ("swe-agent", "tau-bench", "inspect-ai", "request-log"):
        (rows[name],) = imported(write(tmp_path / f"{name}.jsonl", ROWS[name](5)), name)
    assert rows["swe-agent"]["extra"]["info"]["exit_status"] == "submitted"
    assert (rows["tau-bench"]["task_id"], rows["tau-bench"]["task"]["task"]["user_id"]) == ("3", "u")
    assert (rows["inspect-ai"]["task_id"], rows["inspect-ai"]["task"]["target"]) == ("sums-1", "5")
    assert (rows["inspect-ai"]["policy"], rows["request-log"]["policy"]) == ("m/one", "one-1")
    assert [row["tools"] for row in rows.values()] == [[], [], TOOLS, TOOLS]
    assert [row["rewards"] for row in rows.values()] == [{}, {}, {"match": 1.0}, {}]


def test_scores_of_inspect_are_named_and_a_failed_sample_has_none(tmp_path: Path) -> None:
    log = ROWS["inspect-ai"](5)
    (sample,) = log["samples"]
    scores = {"match": {"value": "I"}, "judge": {"value": {"style": 0.5, "note": "x"}}}
    log["samples"] = [sample | {"scores": scores}, sample | {"id": 2, "error": {"message": "x"}}]
    first, second = imported(write(tmp_path / "a.json", log), "inspect-ai")
    assert (first["reward"], first["rewards"]) == (None, {"match": 0.0, "judge/style": 0.5})
    assert (second["reward"], second["rewards"]) == (None, {})


def test_a_log_of_anthropic_has_calls_results_and_tools(tmp_path: Path) -> None:
    asked = [QUESTION, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": OUTCOME}]
    tools = [{"name": "add", "description": "Adds.", "input_schema": {}}]
    said_last = {"role": "assistant", "type": "message", "model": "m", "stop_reason": "max_tokens",
                 "content": [{"type": "text", "text": "5"}]}  # fmt: skip
    row = {"request": {"system": "Be brief.", "messages": asked, "tools": tools}, "response": said_last}
    (read,) = imported(write(tmp_path / "a.jsonl", row), "request-log")
    call = {"role": "assistant", "reasoning": "Add.", "tool_calls": CALLS.replace('"{\\"a\\": 2}"', '{"a": 2}')}
    assert said(read["messages"]) == [SYSTEM, QUESTION, call, RESULT, ANSWER]
    assert (read["tools"], read["status"], read["policy"]) == (TOOLS, "truncated", "m")


def test_requests_and_responses_of_a_batch_are_joined(tmp_path: Path) -> None:
    """They are two files, whose lines have no common order."""
    asked = [
        {"custom_id": n, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [QUESTION]}}
        for n in "abc"
    ]
    body = {"model": "m", "choices": [{"finish_reason": "stop", "message": ANSWER}]}
    got = [{"id": "x", "custom_id": n, "response": {"status_code": 200, "body": body}, "error": None} for n in "bad"]
    files = [write(tmp_path / "in.jsonl", *asked), write(tmp_path / "out.jsonl", *got)]
    summary = gymdata.import_rollouts([str(file) for file in files], tmp_path / "run")
    assert (summary.format, summary.rollouts, summary.rejected) == ("openai-batch", 2, 2)
    rows = read_table(tmp_path / "run").to_pylist()
    assert [said(row["messages"]) for row in rows] == [[QUESTION, ANSWER]] * 2
    named = (tmp_path / "run" / "rejected.jsonl").read_text()
    assert "'d': no request in these files" in named
    assert "'c': no response in these files" in named


def test_an_id_that_two_requests_of_batches_have_joins_nothing(tmp_path: Path) -> None:
    """Ids are told apart within a batch; of two batches none of the answers is given to the other's question."""
    other = {"role": "user", "content": "Capital of France?"}
    asked = [{"custom_id": "a", "method": "POST", "body": {"messages": [question]}} for question in (QUESTION, other)]
    body = {"choices": [{"finish_reason": "stop", "message": ANSWER}]}
    got = [{"custom_id": "a", "response": {"status_code": 200, "body": body}}] * 2
    files = [write(tmp_path / f"{n}.jsonl", row) for n, row in enumerate([*asked, *got])]
    summary = gymdata.import_rollouts([str(file) for file in files], tmp_path / "run")
    assert (summary.rollouts, summary.rejected) == (0, 4)
    assert "'a': 2 requests have it" in (tmp_path / "run" / "rejected.jsonl").read_text()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION], "model_parameters": '{"t": 1}', "response": "A"},
        {"custom_id": "a", "response": "x", "prompt": "Q", "completion": "A"},
    ],
)
def test_a_row_that_only_looks_like_a_log_is_no_defect(row: dict[str, Any], tmp_path: Path) -> None:
    """Values of other types than a log's are of another format, or of none."""
    assert main(["validate", str(write(tmp_path / "x.jsonl", row))]) in (0, 1, 2)


def test_a_part_with_a_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadItem, match="a part of type 'image_url'"):
        text_of([{"type": "image_url", "text": "a cat"}], "content")


def test_what_follows_a_compaction_is_the_rollout(tmp_path: Path) -> None:
    *before, last = SESSIONS["claude-code"]
    summary = {"type": "user", "isCompactSummary": True, "uuid": "v", "parentUuid": None, "sessionId": "s",
               "message": {"role": "user", "content": "A sum was asked for."}}  # fmt: skip
    (row,) = imported(write(tmp_path / "s.jsonl", *before, summary, last), "claude-code")
    assert said(row["messages"]) == [{"role": "user", "content": "A sum was asked for."}, ANSWER]


CLAUDE = SESSIONS["claude-code"]


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("claude-code", CLAUDE[1] | {"uuid": "again"}, "uuid again: the session went back"),
        ("claude-code", CLAUDE[1] | {"parentUuid": "u4", "message": {"role": "user", "content": [
            {"type": "image", "source": {}}]}}, "a part of type 'image'"),
        ("claude-code", 5, "line 8 cannot be read: got no object"),
        ("claude-code", CLAUDE[-1] | {"uuid": "retry"}, "uuid retry: the session went back"),
        ("claude-code", CLAUDE[3] | {"uuid": "late", "parentUuid": "u4"}, "uuid late: its message goes on after"),
        ("codex", {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}}, "rolled back"),
        ("codex", {"type": "compacted", "payload": {"message": ""}}, "compacted"),
        ("codex", {"type": "response_item", "payload": {"type": "web_search_call"}}, "got type 'web_search_call'"),
    ],
)  # fmt: skip
def test_a_session_that_is_not_one_conversation_is_named(name: str, line: Any, reason: str, tmp_path: Path) -> None:
    (named,) = rejected(write(tmp_path / "s.jsonl", *SESSIONS[name], line), name)
    assert reason in named["reason"]


def test_many_rows_with_one_cause_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", VERIFIERS, *([VERIFIERS | {"images": ["1.png"]}] * 9))
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.count("rejected") == 2  # how many, and the file that names them
    for name in ROWS.keys() - {"inspect-ai", "verifiers-traces"}:
        (named,) = rejected(write(tmp_path / f"{name}.jsonl", ROWS[name](5) | {"images": ["1.png"]}), name)
        assert "images: images" in named["reason"]


def test_answers_that_were_given_are_not_trained(tmp_path: Path) -> None:
    """Of the prompt of a trace, and of the input of a sample."""
    trace, log = ROWS["verifiers-traces"](5)["traces"][0], ROWS["inspect-ai"](5)
    trace["nodes"][1]["sampled"] = False
    log["samples"][0]["messages"][2]["source"] = "input"
    for name, row in (("verifiers-traces", trace), ("inspect-ai", log)):
        (read,) = imported(write(tmp_path / f"{name}.jsonl", row), name)
        weights = [m["extra"] for m in read["messages"] if m["role"] == "assistant"]
        assert weights == ['{"weight": 0}', None]
