"""The figures of an epoch, and the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.finetune import figures
from gymdata.store import write_run_json
from tests.rollout_files import rollout, two_turns, write_run


def run(folder: Path, rewards: dict[str, list[float | None]]) -> Path:
    rows = [
        rollout(task, index, reward, two_turns(3, 20 + index))
        for task, of in rewards.items()
        for index, reward in enumerate(of)
    ]
    return write_run(folder, rows)


def scores(rewards: dict[str, list[float | None]]) -> pa.Table:
    rows = [(task, reward) for task, of in rewards.items() for reward in of]
    return pa.table({"task_id": [task for task, _ in rows], "reward": pa.array([one for _, one in rows], pa.float64())})


def test_missing_scores_are_counted_and_not_averaged_in() -> None:
    """None, NaN and infinity are unscored; nothing scored gives no mean rather than 0."""
    table = pa.table({"task_id": ["a", "a", "b", "b"], "reward": [1.0, None, math.nan, 0.5]})
    found = figures.rewards(table)
    assert (found["reward_mean"], found["unscored"], found["rollouts"]) == (0.75, 2, 4)
    empty = figures.rewards(pa.table({"task_id": ["a"], "reward": pa.array([None], pa.float64())}))
    assert (empty["reward_mean"], empty["reward_min"], empty["reward_ci95"]) == (None, None, None)


def test_the_held_out_rate_counts_what_is_above_the_threshold() -> None:
    """One rollout a task: Wilson's interval; several: by task; none scored: no rate."""
    one = figures.held_out(scores({"a": [1.0], "b": [0.4], "c": [0.6], "d": [None]}), 0.5)
    assert (one["n"], one["successes"], one["unscored"], one["rate"]) == (3, 2, 1, pytest.approx(2 / 3))
    assert one["ci95"] == pytest.approx([0.2077, 0.9385], abs=1e-3)
    several = figures.held_out(scores({"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 0.0]}), 0.5)
    assert (several["n"], several["tasks"], several["rate"]) == (6, 3, 0.5)
    assert several["ci95"] is not None
    assert figures.held_out(scores({"a": [None]}), 0.5)["rate"] is None


def test_the_rise_is_paired_by_task(tmp_path: Path) -> None:
    """Only tasks that both runs scored count."""
    before = run(tmp_path / "before", {"a": [0.0], "b": [0.0], "c": [1.0], "d": [0.0]})
    after = run(tmp_path / "after", {"a": [1.0], "b": [0.0], "c": [1.0], "e": [1.0]})
    found = figures.rise(before, after, 0.5)
    assert (found["n"], found["rate"]) == (3, pytest.approx(1 / 3))


def test_what_a_training_left_is_read(tmp_path: Path) -> None:
    """The loss is the whole training's where it was logged, else the mean of its entries; a torn line is passed over."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"ste')
    assert figures.trained(tmp_path)["training_loss"] == 1.5
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "train_loss": 1.75}\n')
    assert figures.trained(tmp_path)["training_loss"] == 1.75
    assert figures.trained(tmp_path / "absent") == dict.fromkeys(figures.trained(tmp_path), None)


def row(epoch: int, **changed: Any) -> dict[str, Any]:
    return {
        "epoch": epoch, "algorithm": "rl", "policy_version": epoch - 1, "reward_mean": 0.5, "reward_ci95": [0.4, 0.6],
        "reward_min": 0.0, "reward_max": 1.0, "rollouts": 8, "unscored": 1, "missing": 2, "groups": 4,
        "groups_selected": 1, "groups_left_out": {"rewards too alike": 3}, "trained_tokens": 10, "training_loss": 0.1,
        "curriculum": {"enabled": True, "current_percentile": 0.3}, "kl_to_start": 0.0, "validation": None, **changed,
    }  # fmt: skip


def test_the_page_bears_gaps(tmp_path: Path) -> None:
    """Nothing measured is nothing drawn; what was left out is told with its reason; text is escaped."""
    rows = [
        row(1, validation={"rate": 0.5, "ci95": None, "n": 4}),
        row(2, reward_mean=None, reward_ci95=None, reward_min=None, reward_max=None, kl_to_start=None, training_loss=None,
            skipped="no <pair> came", groups_left_out={}),
    ]  # fmt: skip
    write_run_json(tmp_path, {"stage": "finetune", "run_id": "<x>"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    gymdata.report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "&lt;x&gt;" in page
    assert "no &lt;pair&gt; came" in page
    assert "3 groups: rewards too alike; 1 rollout without a score; 2 rollouts missing" in page
    assert json.dumps(rows)
