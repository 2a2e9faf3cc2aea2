"""Dumps with the ids of each model call: turns of the rollout that they are of, as they were sampled, or an error by name.

The shapes are those of ``TraceRecord`` (rllm-org/rllm, rllm-model-gateway/src/rllm_model_gateway/models.py:9, 9beb6e0f),
``TokenEntry`` (NVIDIA-NeMo/Gym, nemo_gym/token_id_capture/records.py:46, 07d6b0d0), ``TrialResult`` with ``RolloutDetail``
(harbor 0.26.0, harbor/models/trial/result.py:91 and models/agent/rollout_detail.py:4) and ART's ``TrajectoryGroup`` with
the choices of its Tinker backend (openpipe-art 0.5.18, art/tinker_native/backend.py:478), and ``TraceRecord`` of
awslabs/agentcore-rl-toolkit (src/agentcore_rl_toolkit/rollout_gateway/trace.py:48, 7bdd4159).
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.commands.check.rollouts import check_rollouts
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from tests.formats.published_rows import art
from tests.formats.trajectories import imported, rejected, write

ASKED = {"role": "user", "content": "2+3?"}
SAID = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]}  # fmt: skip
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "5"}
ENDED = {"role": "assistant", "content": "5"}


def trace(n: int, messages: list[Any], prompt: list[int], ids: list[int], said: Any, **more: Any) -> dict[str, Any]:
    return {
        "trace_id": f"t{n}", "session_id": "s-1", "model": "m", "messages": messages, "prompt_token_ids": prompt,
        "response_message": said, "completion_token_ids": ids, "logprobs": [-0.25 - k for k in range(len(ids))],
        "routing_matrices": None, "finish_reason": "stop", "weight_version": 3, "latency_ms": 5.0,
        "token_counts": {"prompt": len(prompt), "completion": len(ids)}, "timestamp": 1_700_000_000.0 + n,
        "metadata": {"task": "sum"}, "raw_request": {"model": "m"}, "raw_response": None,
    } | more  # fmt: skip


TRACES = [
    trace(1, [ASKED], [1, 2, 3], [4, 5], SAID),
    trace(2, [ASKED, SAID, TOOL], [1, 2, 3, 4, 5, 6], [7, 8], ENDED, finish_reason="length"),
]


def entry(n: int, prompt: list[int], ids: list[int], text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "schema_version": 1, "rollout_id": "0-1", "model_call_id": f"c{n}", "model": "m", "prompt_token_ids": prompt,
        "generation_token_ids": ids, "generation_log_probs": [-0.5] * len(ids), "routed_experts": None,
        "output_items": [{"type": "message", "role": "assistant", "content": content}], "token_item_index": 0,
        "created_at": 1_700_000_000.0 + n,
    } | more  # fmt: skip


ENTRIES = [entry(1, [1, 2], [3, 4], "a"), entry(2, [1, 2, 3, 4, 9], [5], "b")]


def trial(**more: Any) -> dict[str, Any]:
    details = [
        {"prompt_token_ids": [[1, 2], [1, 2, 3, 9]], "completion_token_ids": [[3], [4, 5]],
         "logprobs": [[-0.5], [-0.25, -1.0]]},
        {"prompt_token_ids": [[7]], "completion_token_ids": [[8]], "logprobs": [[-2.0]]},
    ]  # fmt: skip
    return {
        "id": "0b0c", "task_name": "org/sum", "trial_name": "sum__1", "trial_uri": "file:///t", "task_id": {"path": "t"},
        "source": None, "task_checksum": "c", "config": {}, "agent_info": {"name": "terminus-2", "version": "2",
        "model_info": {"name": "m", "provider": "p"}}, "agent_result": {"n_input_tokens": 6, "rollout_details": details},
        "verifier_result": {"rewards": {"reward": 1.0}}, "exception_info": None, "step_results": None,
        "started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:02Z",
    } | more  # fmt: skip


def record(ids: list[int], mask: list[int], log_probs: list[float], **more: Any) -> dict[str, Any]:
    return {
        "token_ids": ids, "loss_mask": mask, "logprobs": log_probs, "rollout_id": 7, "reward": 0.5,
        "response_length": len(mask), "response": "", "metadata": {"leaf": 1}, "status": "completed",
    } | more  # fmt: skip


#: A conversation of two calls, and its fork after the first, which is context there.
TREE = [
    record([1, 2, 3, 4, 9, 5], [1, 1, 0, 1], [-0.5, -0.75, 0.0, -1.0]),
    record([1, 2, 3, 4, 8, 6], [0, 0, 0, 1], [0.0, 0.0, 0.0, -2.0]),
]


def calls_of(row: dict[str, Any]) -> list[tuple[Any, ...]]:
    prompts = expand_prompts(row["turns"])
    return [
        tuple(np.asarray(ids).tolist() for ids in (prompt, turn["generation_token_ids"], turn["generation_log_probs"]))
        for prompt, turn in zip(prompts, row["turns"], strict=True)
    ]


def test_traces_of_a_session_are_the_turns_of_a_rollout(tmp_path: Path) -> None:
    """In the order of their times, with the weights of each, on the messages that they wrote; the limit of the last."""
    (row,) = imported(write(tmp_path / "traces.jsonl", *reversed(TRACES)), "rllm-traces")
    assert calls_of(row) == [([1, 2, 3], [4, 5], [-0.25, -1.25]), ([1, 2, 3, 4, 5, 6], [7, 8], [-0.25, -1.25])]
    assert [message["turn"] for message in row["messages"]] == [None, 0, None, 1]
    assert row["turns"][0]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
    assert [turn["finish_reason"] for turn in row["turns"]] == ["stop", "length"]
    assert (row["status"], row["policy"], row["reward"], row["n_breaks"]) == ("truncated", "m", None, 0)
    assert json.loads(row["extra"]) == {"session_id": "s-1", "metadata": {"task": "sum"}}


def test_the_answer_of_the_gateway_is_a_list(tmp_path: Path) -> None:
    """Sessions in one list are a rollout each."""
    other = [call | {"session_id": "s-2"} for call in TRACES]
    (tmp_path / "traces.json").write_text(json.dumps([TRACES[0], *other, TRACES[1]]))
    rows = imported(tmp_path / "traces.json", "rllm-traces")
    assert [row["n_turns"] for row in rows] == [2, 2]
    assert rows[0]["group_id"] == rows[1]["group_id"]


def test_a_trace_that_no_later_conversation_has_is_a_turn_without_a_message(tmp_path: Path) -> None:
    """A retry's answer that the agent did not keep."""
    lost = trace(0, [ASKED], [1, 2, 3], [9], {"role": "assistant", "content": "oops"})
    (row,) = imported(write(tmp_path / "traces.jsonl", lost, *TRACES), "rllm-traces")
    assert [message["turn"] for message in row["messages"]] == [None, 1, None, 2]
    assert row["n_turns"] == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": [-1.0]}, "calls[1]: got 1, expected 2, one per generated token"),
        ({"prompt_token_ids": []}, "calls[1]: ids of its prompt are missing, and other model calls have their ids"),
        ({"completion_token_ids": [7, 2**31]}, "calls[1].completion_token_ids[1]: got 2147483648"),
    ],
)
def test_a_trace_with_a_fault_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """The session is rejected with the call that is wrong."""
    (bad,) = rejected(write(tmp_path / "traces.jsonl", TRACES[0], TRACES[1] | change), "rllm-traces")
    assert reason in bad["reason"]


def test_traces_without_log_probs_have_none(tmp_path: Path) -> None:
    """They are unknown, which `check` says: SFT could use them, and no ratio."""
    file = write(tmp_path / "traces.jsonl", *(call | {"logprobs": None} for call in TRACES))
    report = check_rollouts(file)
    assert report.log_probs == "unknown or not finite in 1 rollout (L302)"
    assert report.verdict == (
        "not with ratios: 1 of 1 rollouts have token ids, but no log-probabilities are known (L302)"
    )
    usable = {use.trainer: (use.rollouts, use.why) for use in report.trainers}
    assert usable["train-sft"][0] == 1
    assert usable["train-rl"] == (0, "refused: no log-probabilities are known (L302)")


def test_captured_calls_are_the_turns_of_a_rollout(tmp_path: Path) -> None:
    """By their time, with the texts of the model, under NeMo Gym's id of the rollout."""
    (row,) = imported(write(tmp_path / "0-1.tokens.jsonl", *reversed(ENTRIES)), "nemo-gym-tokens")
    assert calls_of(row) == [([1, 2], [3, 4], [-0.5, -0.5]), ([1, 2, 3, 4, 9], [5], [-0.5])]
    assert [(message["content"], message["turn"]) for message in row["messages"]] == [("a", 0), ("b", 1)]
    assert (row["rollout_id"], row["policy"], row["reward"]) == ("0-1", "m", None)


def test_a_call_that_was_captured_without_its_items_is_a_turn(tmp_path: Path) -> None:
    """The ids are what was sampled; there is no text."""
    rows = [ENTRIES[0], ENTRIES[1] | {"output_items": [], "token_item_index": None}]
    (row,) = imported(write(tmp_path / "0-1.tokens.jsonl", *rows), "nemo-gym-tokens")
    assert len(calls_of(row)) == 2


def test_a_newer_record_of_a_call_is_refused(tmp_path: Path) -> None:
    """As NeMo Gym's own reader refuses it."""
    (bad,) = rejected(write(tmp_path / "t.jsonl", ENTRIES[0] | {"schema_version": 2}), "nemo-gym-tokens")
    assert "calls[0].schema_version: got 2" in bad["reason"]


def test_an_item_that_a_captured_call_does_not_have_is_named(tmp_path: Path) -> None:
    """With the call, and how many items there are."""
    (bad,) = rejected(write(tmp_path / "t.jsonl", ENTRIES[0] | {"token_item_index": 5}), "nemo-gym-tokens")
    assert bad["reason"] == f"token_item_index of {ENTRIES[0]['model_call_id']}: got 5, expected 0 to 0"


@pytest.mark.parametrize(("reward", "got"), [("1", "'1'"), (None, "null")])
def test_a_reward_of_a_trial_that_is_no_number_is_named(tmp_path: Path, reward: Any, got: str) -> None:
    """By its path in the trial alone."""
    bad = trial(verifier_result={"rewards": {"reward": reward}})
    (row,) = rejected(write(tmp_path / "result.jsonl", bad), "harbor")
    assert row["reason"] == f"verifier_result.rewards.reward: got {got}, expected a valid number"


def test_a_trial_of_harbor_keeps_the_ids_of_each_call(tmp_path: Path) -> None:
    """Of the agent and of its segments, with the verifier's reward and the times of the trial."""
    (row,) = imported(write(tmp_path / "result.jsonl", trial()), "harbor")
    assert calls_of(row) == [([1, 2], [3], [-0.5]), ([1, 2, 3, 9], [4, 5], [-0.25, -1.0]), ([7], [8], [-2.0])]
    assert [turn["agent"] for turn in row["turns"]] == [None, None, "segment-1"]
    assert (row["reward"], row["rewards"], row["group_id"], row["policy"]) == (1.0, {"reward": 1.0}, "org/sum", "m")
    assert row["duration_s"] == 2.0
    assert check_rollouts(tmp_path / "result.jsonl").ok  # without text there is no fault of messages


def test_a_trial_with_local_times_keeps_how_long_it_took(tmp_path: Path) -> None:
    """As Harbor wrote them in January 2026: the zone is not known, so neither is when the trial began."""
    times = {"started_at": "2026-01-26T02:12:06.5", "finished_at": "2026-01-26T02:12:08.5"}
    file = write(tmp_path / "result.jsonl", trial(**times))
    (row,) = imported(file, "harbor")
    assert (row["started_at"].year, row["duration_s"]) == (1970, 2.0)
    assert check_rollouts(file).ok


@pytest.mark.parametrize("where", ["trial", "step"])
def test_a_trial_with_an_exception_is_a_failed_attempt(tmp_path: Path, where: str) -> None:
    """Also where a step of it has the exception; never a reward of 0."""
    error = {"exception_type": "AgentTimeoutError", "exception_message": "late", "exception_traceback": "…"}
    change = {"exception_info": error} if where == "trial" else {"step_results": [{"exception_info": error}]}
    report = check_rollouts(write(tmp_path / "result.jsonl", trial(), trial(trial_name="sum__2", **change)))
    assert report.failures == {"environment: AgentTimeoutError": 1}
    assert report.validation.rollouts == 1


def test_a_trial_whose_lists_differ_is_named(tmp_path: Path) -> None:
    """Harbor leaves out lists that a call lacks: which belongs to which is not known."""
    bad = trial()
    del bad["agent_result"]["rollout_details"][0]["prompt_token_ids"][1]
    (row,) = rejected(write(tmp_path / "result.jsonl", bad), "harbor")
    assert row["code"] == "T205"
    assert "agent_result.rollout_details[0]: got 1 prompts, 2 completions and 2 lists" in row["reason"]


def test_a_reward_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    """It is neither 0 nor missing."""
    (row,) = rejected(
        write(tmp_path / "result.jsonl", trial(verifier_result={"rewards": {"reward": math.nan}})), "harbor"
    )
    assert (row["code"], row["reason"]) == ("R502", "verifier_result.rewards: got nan, expected a finite number")


def test_the_branches_of_a_tree_are_one_rollout(tmp_path: Path) -> None:
    """What both have in common was sampled once; the reward is that of the whole."""
    (row,) = imported(write(tmp_path / "records.jsonl", *TREE), "agentcore")
    assert calls_of(row) == [([1, 2], [3, 4], [-0.5, -0.75]), ([1, 2, 3, 4, 9], [5], [-1.0]),
                             ([1, 2, 3, 4, 8], [6], [-2.0])]  # fmt: skip
    assert (row["reward"], json.loads(row["extra"])["rollout_id"], row["n_breaks"]) == (0.5, 7, 0)
    assert check_rollouts(tmp_path / "records.jsonl").ok


def test_a_mask_that_contradicts_its_log_probs_is_named(tmp_path: Path) -> None:
    """With the branch and the first position."""
    bad = [TREE[0], record([1, 2, 3], [0], [-0.5])]
    (row,) = rejected(write(tmp_path / "records.jsonl", *bad), "agentcore")
    assert row["reason"].startswith("calls[1].loss_mask[0]: got 0, but logprobs[0]: the log-probability -0.5")


@pytest.mark.parametrize(("status", "failures", "rollouts"), [("failed", 1, 0), ("aborted", 1, 1), ("truncated", 0, 1)])
def test_a_status_of_a_record_counts(tmp_path: Path, status: str, failures: int, rollouts: int) -> None:
    """A failed rollout is a failed attempt, an aborted one has no reward, a truncated one is cut."""
    report = check_rollouts(write(tmp_path / "r.jsonl", TREE[0], TREE[1] | {"status": status}))
    assert (len(report.failures), report.validation.rollouts) == (failures, rollouts)


def test_ids_of_art_without_their_prompts_are_named(tmp_path: Path) -> None:
    """A choice has the ids of what was sampled; without those of the prompt they are no turn, and are not dropped in
    silence."""
    group = art(5)
    group["trajectories"][0]["messages_and_choices"][1]["logprobs"] = {
        "content": [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": []}]
    }
    with pytest.warns(match="art: token ids in the `logprobs` of 1 row are not read"):
        gymdata.import_rollouts(write(tmp_path / "a.jsonl", group), tmp_path / "run")


@pytest.mark.parametrize(("name", "rows"), [("rllm-traces", TRACES), ("nemo-gym-tokens", ENTRIES)])
def test_a_call_that_is_there_twice_is_no_second_turn(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A log that was written twice would train its tokens twice."""
    (row,) = rejected(write(tmp_path / "a.jsonl", *rows, rows[0]), name)
    assert row["code"] == "D701"
    assert "twice in one" in row["reason"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [("agentcore", TREE), ("rllm-traces", TRACES), ("nemo-gym-tokens", ENTRIES), ("harbor", [trial()])],
)
def test_mutated_dumps_are_read_or_named(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Whatever became of a field, a file is imported without a crash, and what is imported has ids that it had."""
    draw = random.Random(name)
    odd = (None, "x", -1, 2**40, 1.5, [], {}, [[1]], [None], True, [2**31], "NaN", [float("nan")])
    for n in range(60):
        bad = json.loads(json.dumps(rows))
        row = draw.choice(bad)
        while isinstance(inner := row.get(key := draw.choice([*row])), dict) and inner and draw.random() < 0.7:
            row = inner
        row[key] = draw.choice(odd)
        text = json.dumps(bad)
        (tmp_path / f"{n}.json").write_text(text)
        done = gymdata.import_rollouts(tmp_path / f"{n}.json", tmp_path / f"run-{n}", source=name)
        assert done.rows_in >= 1
        for table_row in read_table(tmp_path / f"run-{n}", ROLLOUTS).to_pylist():
            for prompt, generation, _ in calls_of(table_row):
                assert json.dumps(prompt)[1:-1] in text
                assert json.dumps(generation)[1:-1] in text
