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
from gymdata.cli.main import main
from gymdata.interop.blocks import text_of
from gymdata.interop.importing import BadItem
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.interop.trajectories import ANSWER, QUESTION, RESULT, ROWS, said, write

CALLS = '[{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 2}"}}]'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


VERIFIERS, COMPLETIONS, VERL, SKYRL = (
    ROWS[name](5) for name in ("verifiers", "trl-completions", "verl-dump", "skyrl-dump")
)
SYSTEM = {"role": "system", "content": "Be brief."}


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


def test_traces_of_verifiers_are_read_from_episodes_and_alone(tmp_path: Path) -> None:
    episode = ROWS["verifiers-traces"](5)
    (trace,) = episode["traces"]
    rows = [episode, trace | {"ok": False}]
    first, second = imported(write(tmp_path / "traces.jsonl", *rows), tmp_path, "verifiers-traces")
    assert [m["content"] for m in said(first["messages"]) if "content" in m] == ["How much is 2+3?", "5", "5"]
    assert (first["messages"][1]["reasoning"], first["messages"][1]["tool_calls"]) == ("Add.", CALLS)
    assert (first["reward"], first["rewards"], first["tools"]) == (0.5, {"exact": 1.0, "turns": 2.0}, TOOLS)
    assert (first["task"]["answer"], first["group_id"], first["policy"]) == ("5", "sum-7", "m")
    assert (second["reward"], second["rewards"]) == (None, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"agent": {"name": "judge", "trainable": False}}, "the agent 'judge' is not trained"),
        ({"nodes": [{"message": QUESTION}, {"message": ANSWER}]}, "nodes: got 2 that are not one conversation"),
    ],
)
def test_a_trace_of_verifiers_that_is_no_one_conversation_is_named(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    row = ROWS["verifiers-traces"](5)["traces"][0] | change
    (named,) = reasons(write(tmp_path / "traces.jsonl", row), tmp_path, "verifiers-traces")
    assert reason in named


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


def test_the_reward_of_two_functions_is_not_the_one_that_has_a_value(tmp_path: Path) -> None:
    """pandas writes the NaN of a function that does not apply as null."""
    rows = [COMPLETIONS, COMPLETIONS | {"exact": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00003.parquet")
    read = imported(tmp_path / "completions_00003.parquet", tmp_path, "trl-completions")
    assert [row["reward"] for row in read] == [None, None]


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


CALLED = {"role": "assistant", "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        (
            "swe-agent",
            [
                {"role": "assistant", "content": "A sum.", "extra": '{"weight": 0}'}, QUESTION,
                CALLED | {"content": "", "reasoning": "Add."}, RESULT, ANSWER,
            ],
        ),
        ("mini-swe-agent", [QUESTION, CALLED, RESULT, ANSWER]),
        ("tau-bench", [QUESTION, CALLED, RESULT | {"name": "add"}, ANSWER]),
        ("request-log", [QUESTION, ANSWER]),
        (
            "inspect-ai",
            [
                SYSTEM, QUESTION,
                CALLED | {"content": "", "reasoning": "Add.", "tool_calls": CALLS.replace('"{\\"a\\": 2}"', '{"a": 2}')},
                RESULT | {"name": "add"}, ANSWER,
            ],
        ),
    ],
)  # fmt: skip
def test_a_trajectory_becomes_its_messages(name: str, messages: list[dict[str, Any]], tmp_path: Path) -> None:
    """Files are pretty-printed, as these harnesses write them."""
    (tmp_path / "a.json").write_text(json.dumps(ROWS[name](5), indent=2))
    (row,) = imported(tmp_path / "a.json", tmp_path, name)
    assert said(row["messages"]) == messages
    expected = {"tau-bench": (1.0, {}), "inspect-ai": (1.0, {"match": 1.0})}
    assert (row["reward"], row["rewards"]) == expected.get(name, (None, {}))
    assert row["tools"] == (TOOLS if name in ("request-log", "inspect-ai") else [])


def test_task_and_facts_of_a_trajectory_are_kept(tmp_path: Path) -> None:
    rows = {}
    for name in ("swe-agent", "tau-bench", "inspect-ai", "request-log"):
        (rows[name],) = imported(write(tmp_path / f"{name}.jsonl", ROWS[name](5)), tmp_path / name, name)
    assert rows["swe-agent"]["extra"]["info"]["exit_status"] == "submitted"
    assert (rows["tau-bench"]["task_id"], rows["tau-bench"]["task"]["task"]["user_id"]) == ("3", "u")
    assert (rows["inspect-ai"]["task_id"], rows["inspect-ai"]["task"]["target"]) == ("sums-1", "5")
    assert (rows["inspect-ai"]["policy"], rows["request-log"]["policy"]) == ("m/one", "one-1")


def test_scores_of_inspect_are_named_and_a_failed_sample_has_none(tmp_path: Path) -> None:
    log = ROWS["inspect-ai"](5)
    (sample,) = log["samples"]
    scores = {"match": {"value": "I"}, "judge": {"value": {"style": 0.5, "note": "x"}}}
    log["samples"] = [sample | {"scores": scores}, sample | {"id": 2, "error": {"message": "x"}}]
    first, second = imported(write(tmp_path / "a.json", log), tmp_path, "inspect-ai")
    assert (first["reward"], first["rewards"]) == (None, {"match": 0.0, "judge/style": 0.5})
    assert (second["reward"], second["rewards"]) == (None, {})


BLOCKS = [
    {"type": "thinking", "thinking": "Add.", "signature": "s"},
    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}},
]
OUTCOME = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]}]
SPOKEN = CALLED | {"reasoning": "Add.", "tool_calls": CALLS.replace('"{\\"a\\": 2}"', '{"a": 2}')}


def test_a_log_of_anthropic_has_calls_results_and_tools(tmp_path: Path) -> None:
    asked = [QUESTION, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": OUTCOME}]
    tools = [{"name": "add", "description": "Adds.", "input_schema": {}}]
    said_last = {"role": "assistant", "type": "message", "model": "m", "stop_reason": "max_tokens",
                 "content": [{"type": "text", "text": "5"}]}  # fmt: skip
    row = {"request": {"system": "Be brief.", "messages": asked, "tools": tools}, "response": said_last}
    (read,) = imported(write(tmp_path / "a.jsonl", row), tmp_path, "request-log")
    assert said(read["messages"]) == [SYSTEM, QUESTION, SPOKEN, RESULT, ANSWER]
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
    assert [said(row["messages"]) for row in to_rows(read_table(tmp_path / "run", ROLLOUTS))] == [
        [QUESTION, ANSWER]
    ] * 2
    named = (tmp_path / "run" / "rejected.jsonl").read_text()
    assert "'d': no request in these files" in named
    assert "'c': no response in these files" in named


def test_an_id_that_two_requests_of_batches_have_joins_nothing(tmp_path: Path) -> None:
    """Ids are told apart within a batch; of two batches none of the answers is given to the other's question."""
    other = {"role": "user", "content": "Capital of France?"}
    asked = [{"custom_id": "a", "method": "POST", "body": {"messages": [question]}} for question in (QUESTION, other)]
    body = {"choices": [{"finish_reason": "stop", "message": ANSWER}]}
    got = [{"custom_id": "a", "response": {"status_code": 200, "body": body}}] * 2
    files = [write(tmp_path / f"in{n}.jsonl", row) for n, row in enumerate(asked)]
    files += [write(tmp_path / f"out{n}.jsonl", row) for n, row in enumerate(got)]
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
    file = write(tmp_path / "x.jsonl", row)
    assert main(["validate", str(file)]) in (0, 1, 2)


def test_a_part_with_a_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadItem, match="a part of type 'image_url'"):
        text_of([{"type": "image_url", "text": "a cat"}], "content")


def claude_code() -> list[dict[str, Any]]:
    def line(n: int, role: str, content: Any, **more: Any) -> dict[str, Any]:
        message = {"role": role, "content": content, **({"id": more.pop("id"), "model": "m"} if "id" in more else {})}
        ids = {"uuid": f"u{n}", "parentUuid": f"u{n - 1}" if n else None, "sessionId": "s", "cwd": "/w"}
        return {"type": role, "isSidechain": False, "message": message, **ids, **more}

    return [
        {"type": "summary", "summary": "A sum", "leafUuid": "u4"},
        line(0, "user", "How much is 2+3?"),
        line(1, "assistant", BLOCKS[:1], id="m1"),
        line(2, "assistant", BLOCKS[1:], id="m1"),
        line(3, "user", OUTCOME, toolUseResult={"stdout": "5"}),
        line(3, "user", "Other work.", isSidechain=True),
        line(4, "assistant", [{"type": "text", "text": "5"}], id="m2"),
    ]


def codex() -> list[dict[str, Any]]:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How much is 2+3?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}], "encrypted_content": "x"},
        {"type": "function_call", "name": "add", "arguments": '{"a": 2}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5"}]},
    ]
    meta = {"type": "session_meta", "payload": {"id": "s", "cwd": "/w", "base_instructions": {"text": "Be brief."}}}
    event = {"type": "event_msg", "payload": {"type": "agent_message", "message": "5"}}
    turn = {"type": "turn_context", "payload": {"model": "m"}}
    return [meta, turn, *({"type": "response_item", "payload": item} for item in items), event]


def test_a_session_is_one_rollout(tmp_path: Path) -> None:
    (row,) = imported(write(tmp_path / "s.jsonl", *claude_code()), tmp_path / "a", "claude-code")
    assert said(row["messages"]) == [QUESTION, SPOKEN, RESULT, ANSWER]
    assert (row["reward"], row["policy"], row["extra"]["cwd"]) == (None, "m", "/w")
    (row,) = imported(write(tmp_path / "rollout.jsonl", *codex()), tmp_path / "b", "codex")
    assert said(row["messages"]) == [SYSTEM, QUESTION, CALLED | {"reasoning": "Add."}, RESULT, ANSWER]
    assert (row["reward"], row["policy"], row["extra"]["id"]) == (None, "m", "s")


def test_what_follows_a_compaction_is_the_rollout(tmp_path: Path) -> None:
    *before, last = claude_code()
    summary = {"type": "user", "isCompactSummary": True, "uuid": "v", "parentUuid": None, "sessionId": "s",
               "message": {"role": "user", "content": "A sum was asked for."}}  # fmt: skip
    (row,) = imported(write(tmp_path / "s.jsonl", *before, summary, last), tmp_path, "claude-code")
    assert said(row["messages"]) == [{"role": "user", "content": "A sum was asked for."}, ANSWER]


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("claude-code", claude_code()[1] | {"uuid": "again"}, "uuid again: the session went back"),
        ("claude-code", claude_code()[1] | {"parentUuid": "u4", "message": {"role": "user", "content": [
            {"type": "image", "source": {}}]}}, "a part of type 'image'"),
        ("claude-code", 5, "line 8 cannot be read: got no object"),
        ("claude-code", claude_code()[-1] | {"uuid": "retry"}, "uuid retry: the session went back"),
        ("claude-code", claude_code()[3] | {"uuid": "late", "parentUuid": "u4"}, "uuid late: its message goes on after"),
        ("codex", {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}}, "rolled back"),
        ("codex", {"type": "compacted", "payload": {"message": ""}}, "compacted"),
        ("codex", {"type": "response_item", "payload": {"type": "web_search_call"}}, "got type 'web_search_call'"),
    ],
)  # fmt: skip
def test_a_session_that_is_not_one_conversation_is_named(name: str, line: Any, reason: str, tmp_path: Path) -> None:
    lines = claude_code() if name == "claude-code" else codex()
    (named,) = reasons(write(tmp_path / "s.jsonl", *lines, line), tmp_path, name)
    assert reason in named


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
        (
            "swe-agent",
            {"history": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of type 'image_url'",
        ),
        ("mini-swe-agent", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: got 'wizard'"),
        ("tau-bench", {"info": {"error": "x"}, "traj": []}, "info.error: the run ended with 'x'"),
        ("tau-bench", {"reward": None}, "reward: got None, expected a number"),
        ("request-log", {"response": {"choices": []}}, "choices: got 0, expected 1"),
        ("inspect-ai", {"samples": []}, "sample: is missing"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(name: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (named,) = reasons(write(tmp_path / "rows.jsonl", ROWS[name](5) | change), tmp_path, name)
    assert reason in named


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("inspect-ai", "verifiers-traces")])
def test_many_rows_with_one_cause_are_one_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS[name](5), *([ROWS[name](5) | {"images": ["1.png"]}] * 9)]
    file = write(tmp_path / "rows.jsonl", *rows)
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.count("rejected") == 2  # how many, and the file that names them
    assert all("images: images" in reason for reason in reasons(file, tmp_path, name))


def test_answers_that_were_given_are_not_trained(tmp_path: Path) -> None:
    """Of the prompt of a trace, and of the input of a sample."""
    trace, log = ROWS["verifiers-traces"](5)["traces"][0], ROWS["inspect-ai"](5)
    trace["nodes"][1]["sampled"] = False
    log["samples"][0]["messages"][2]["source"] = "input"
    for name, row in (("verifiers-traces", trace), ("inspect-ai", log)):
        (read,) = imported(write(tmp_path / f"{name}.jsonl", row), tmp_path / name, name)
        weights = [m["extra"] for m in read["messages"] if m["role"] == "assistant"]
        assert weights == ['{"weight": 0}', None]
