"""Runs, stages and models to report on, small enough to count by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

import gymdata
from gymdata.rollouts.turns import turn_digest
from gymdata.store import write_run_json
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, two_turns, write_run

TOOL = json.dumps([{"id": "c", "function": {"name": "add", "arguments": {}}}])
_LISTS = (
    ("prompt_delta_ids", np.int32), ("generation_token_ids", np.int32), ("generation_log_probs", np.float32),
)  # fmt: skip
START = datetime(2026, 1, 1, tzinfo=UTC)


def make(folder: Path, rewards: dict[str, list[float | None]], **facts: Any) -> Path:
    """A run: task "a1" has the field kind "a"; sizes, endings, tool results and times differ by row."""
    rows: list[dict[str, Any]] = []
    for t, (task, values) in enumerate(rewards.items()):
        for i, reward in enumerate(values):
            calls = two_turns(t, 50 + i) if (t + i) % 3 else [([1, t], list(range(40, 45 + i)))]
            result = '{"error": "no"}' if i == 1 else "42"
            messages = [
                {"role": "user", "content": f"{task}?"},
                {"role": "assistant", "content": "", "tool_calls": TOOL, "turn": 0},
                {"role": "tool", "name": "add", "content": result, "tool_call_id": "c"},
                {"role": "assistant", "content": f"{i}", "turn": len(calls) - 1},
            ]
            parts = [{"name": "exact", "value": reward}, {"name": "style", "value": i / 4}]
            row = rollout(task, i, reward, calls, messages=messages, rewards=parts,
                          status="truncated" if i == 2 else "completed", stop_reason="length" if i == 2 else None,
                          started_at=START + timedelta(seconds=len(rows)), duration_s=1.0 + i)  # fmt: skip
            row["task"] = json.dumps({"task_id": task, "kind": task[0]})
            rows.append(row)
    write_run(folder, rows)
    facts = {"run_id": "run-1", "stage": "collect", "policy": "tiny", "command": ["gymdata", "collect", "x"], **facts}
    write_run_json(folder, {**json.loads((folder / "run.json").read_text()), **facts})
    return folder


BEFORE: dict[str, list[float | None]] = {
    "a1": [0.0, 1.0, 0.0, 0.0], "a2": [1.0, 1.0], "a3": [0.0, 0.0, 0.0], "b1": [1.0, None], "b2": [0.0], "b3": [1.0],
    "b4": [0.0], "b5": [1.0],
}  # fmt: skip
AFTER: dict[str, list[float | None]] = {
    "a1": [1.0, 1.0, 1.0, 0.0], "a2": [1.0, 1.0], "a3": [1.0, 0.0, 0.0], "b1": [0.0, None], "b2": [1.0], "b3": [1.0],
    "b4": [0.0], "z9": [1.0],
}  # fmt: skip


def faulty(folder: Path) -> Path:
    """Rewards of many values; log-probabilities that are no numbers, too few, and above zero; failures with and without a
    time."""
    run = make(folder, {"a1": [0.25, 0.5, 0.75], "a2": [-1.0, 0.75, 0.3], "b1": [0.1, 2.0]})
    rows = gymdata.load_rollouts(run).to_pylist()
    changes: list[Callable[[list[float]], Any]] = [
        lambda probs: probs.__setitem__(1, float("nan")),
        lambda probs: probs.pop(),
        lambda probs: probs.__setitem__(0, 0.5),
    ]
    for row, change in zip(rows[1:], changes, strict=False):
        change(row["turns"][0]["generation_log_probs"])
        digest = 0
        for turn in row["turns"]:
            lists: list[Any] = [np.array(turn[name], kind) for name, kind in _LISTS]
            turn["digest"] = digest = turn_digest(digest, turn["prefix_length"], *lists)
    facts = json.loads((run / "run.json").read_text())
    write_run(run, rows)
    write_run_json(run, facts)
    times = [(START + timedelta(seconds=3)).isoformat(), (START + timedelta(seconds=5.5)).isoformat(), "?"]
    lines = [
        json.dumps({"kind": kind, "at": at}) + "\n"
        for kind, at in zip(("engine", "engine", "reward"), times, strict=True)
    ]
    (run / "failures.jsonl").write_text("".join(lines))
    return run


def judged(folder: Path, run: Path) -> Path:
    """A judgement of every two answers of ``run`` by a judge that prefers what it reads first, and twice says nothing of
    use; two judgements of each."""
    with judge_server(Behaviour(first_position_bias=1.0, poisoned={"2": "prose"})) as url:
        gymdata.judge(run, output=folder, model="judge", endpoint=url, genrm_parse_retry_sleep_s=0.0, retry_pause=0.0,
                      num_judges_per_comparison=2)  # fmt: skip
    return folder


def model(folder: Path) -> Path:
    """What a trainer leaves: run.json, and a log whose last line is torn."""
    times = [{"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T00:01:30+00:00"},
             {"started_at": "2026-01-01T01:00:00+00:00"}]  # fmt: skip
    facts = {"stage": "train-dpo", "status": "completed", "steps": 2, "command": ["gymdata", "train-dpo", "x"],
             "training": {"first": {"loss": 1.9}, "last": {"loss": 1.6}},
             "model": {"path": "tiny"}, "versions": {"trl": "1.0"}, "attempts": times,
             "trained_tokens": {"equal": False, "batches": {"count": 9}, "file": {"count": 1_234},
                                "epochs": [{"equal": True, "whole": False}]}}  # fmt: skip
    write_run_json(folder, facts)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "rewards/margins": 0.125}\n{"step": 2, "loss": 1.5, "kl": NaN, "grad_norm": 3}\n{"st'
    )
    return folder


def finetuned(folder: Path) -> Path:
    """What two epochs of finetuning leave."""
    write_run_json(
        folder, {"stage": "finetune", "config": {"model": "tiny", "tasks": "tasks.jsonl", "reward": ["exact"]}}
    )
    epochs: list[dict[str, Any]] = [
        {"epoch": n, "policy_version": n, "reward_mean": 0.25 * n, "rollouts": 40, "groups": 10, "groups_selected": 6 + n,
         "trained_tokens": 1_234, "training_loss": 0.5 / n, "kl_to_start": 0.01 * n, "groups_left_out": {"all equal": 3 - n},
         "rollouts_left_out": {"too_long": 2}, "pairs_dropped": {}, "unscored": n - 1,
         "validation": {"rate": 0.3 + 0.1 * n, "n": 10}}
        for n in (1, 2)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in epochs))
    result = {"validation": {"first": {"epoch": 0, "rate": 0.3, "n": 10}, "last": {"epoch": 2, "rate": 0.5, "n": 10},
                             "difference": {"rate": 0.2, "ci95": [-0.1, 0.5], "n": 10}}}  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder
