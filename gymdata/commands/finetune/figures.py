"""Figures of a finetuning run's epochs: rewards with intervals, held-out rates, and figures of each training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gymdata.errors import DataError
from gymdata.public import Figures
from gymdata.stats import mean_ci, paired_difference_ci, wilson
from gymdata.store import read_run_json, scan_lazy
from gymdata.store.lines import read_metrics

if TYPE_CHECKING:
    import polars as pl


def rewards(scores: pa.Table) -> Figures:
    """Mean, bounds and 95 % interval by task of a table with task_id and reward; how many are unscored."""
    rows = _scored_rows(scores)
    values = rows["reward"]
    mean, low, high = mean_ci(values.to_numpy(), rows["task_id"].to_numpy()) if len(rows) else (math.nan,) * 3
    return {
        "reward_mean": None if math.isnan(mean) else mean,
        "reward_ci95": _interval(low, high),
        "reward_min": values.min(),
        "reward_max": values.max(),
        "rollouts": len(scores),
        "unscored": len(scores) - len(rows),
    }


def missing(run: Path) -> int:
    """Rollouts that a run should have and lacks."""
    import polars as pl

    extent = read_run_json(run).get("extent") or {}
    total = int(extent.get("tasks") or 0) * int(extent.get("num_rollouts") or 0)
    return max(0, total - int(scan_lazy(run).select(pl.len()).collect().item()))


def held_out(scores: pa.Table, threshold: float) -> Figures:
    """Share of the rollouts of a table with task_id and reward whose reward is above ``threshold``, with its 95 % interval:
    Wilson's with one rollout per task, else by bootstrap over tasks."""
    rows = _scored_rows(scores)
    n, unscored, tasks = len(rows), len(scores) - len(rows), rows["task_id"].n_unique()
    if not n:
        return {"n": 0, "tasks": 0, "rate": None, "ci95": None, "reward_mean": None, "unscored": unscored}
    success = (rows["reward"] > threshold).to_numpy().astype(np.float64)
    successes = int(success.sum())
    low, high = wilson(successes, n) if tasks == n else mean_ci(success, rows["task_id"].to_numpy())[1:]
    return {
        "n": n,
        "tasks": tasks,
        "successes": successes,
        "rate": successes / n,
        "ci95": _interval(low, high),
        "reward_mean": rows["reward"].mean(),
        "unscored": unscored,
    }


def rise(first: Path, last: Path, threshold: float) -> Figures:
    """Held-out rate, last minus first, over the tasks that both have scored, with the paired 95 % interval."""
    before, after = _by_task(first, threshold), _by_task(last, threshold)
    tasks = sorted(before.keys() & after.keys())
    if not tasks:
        raise DataError(f"{first} and {last}: have no scored task in common")
    mean, low, high = paired_difference_ci([before[t] for t in tasks], [after[t] for t in tasks])
    return {"rate": mean, "ci95": _interval(low, high), "n": len(tasks)}


def trained(policy: Path) -> Figures:
    """A training's figures from its folder: the proof of its tokens, its loss, and how far it began from the
    sampler."""
    facts = read_run_json(policy) if (policy / "run.json").is_file() else {}
    proof = (facts.get("trained_tokens") or {}).get("batches") or {}
    ratio = facts.get("ratio") or {}
    # The mean over the whole training where it was logged, else over the log's entries.
    logged = read_metrics(policy / "metrics.jsonl")
    means = [float(row["train_loss"]) for row in logged if isinstance(row.get("train_loss"), (int, float))]
    losses = [float(row["loss"]) for row in logged if isinstance(row.get("loss"), (int, float))]
    return {
        "trained_tokens": proof.get("count"),
        "trained_tokens_checksum": proof.get("checksum"),
        "training_loss": means[0] if means else sum(losses) / len(losses) if losses else None,
        "ratio_mean": ratio.get("mean"),
        "effective_sample_size": ratio.get("effective_sample_size"),
        "steps": facts.get("steps"),
    }


def _by_task(run: Path, threshold: float) -> dict[str, float]:
    import polars as pl

    reward = pl.col("reward")
    tasks = scan_lazy(run).filter(reward.is_finite()).group_by("task_id").agg((reward > threshold).mean())
    return dict(tasks.collect(engine="streaming").iter_rows())


def _scored_rows(scores: pa.Table) -> pl.DataFrame:
    """The rows of task_id and reward that have a finite reward."""
    import polars as pl

    rows = pl.DataFrame(pl.from_arrow(scores.select(["task_id", "reward"])))
    return rows.filter(pl.col("reward").is_finite())


def _interval(low: float, high: float) -> list[float] | None:
    return None if math.isnan(low) else [float(low), float(high)]
