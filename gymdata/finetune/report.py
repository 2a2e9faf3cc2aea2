"""report.html of a finetuning run: one file with the curve in it, the epochs as a table, and what each left out and why.

Invariants: everything from outside is escaped; the page needs no network.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gymdata.errors import DataError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.stats import mean_ci, paired_difference_ci, wilson
from gymdata.store import read_run_json, read_table, scan_lazy
from gymdata.store.run_json import replacing

if TYPE_CHECKING:
    import polars as pl


def rewards(scores: pa.Table) -> dict[str, Any]:
    """Mean, bounds and 95 % interval by task of a table with task_id and reward; how many are unscored."""
    known = _known(scores)
    values = known["reward"]
    mean, low, high = mean_ci(values.to_numpy(), known["task_id"].to_numpy()) if len(known) else (math.nan,) * 3
    return {
        "reward_mean": None if math.isnan(mean) else mean,
        "reward_ci95": _interval(low, high),
        "reward_min": values.min(),
        "reward_max": values.max(),
        "rollouts": len(scores),
        "unscored": len(scores) - len(known),
    }


def missing(run: Path) -> int:
    """Rollouts that were wanted of a run and are not there."""
    import polars as pl

    extent = read_run_json(run).get("extent") or {}
    wanted = int(extent.get("tasks") or 0) * int(extent.get("num_rollouts") or 0)
    return max(0, wanted - int(scan_lazy(run).select(pl.len()).collect().item()))


def held_out(run: Path, threshold: float, scores: pa.Table | None = None) -> dict[str, Any]:
    """Share of rollouts with a reward above ``threshold``, with its 95 % interval: Wilson's with one rollout a task, else
    by bootstrap over tasks."""
    table = read_table(run, ROLLOUTS, ["task_id", "reward"]) if scores is None else scores
    known = _known(table)
    n, unscored, tasks = len(known), len(table) - len(known), known["task_id"].n_unique()
    if not n:
        return {"n": 0, "tasks": 0, "rate": None, "ci95": None, "reward_mean": None, "unscored": unscored}
    success = (known["reward"] > threshold).to_numpy().astype(np.float64)
    successes = int(success.sum())
    low, high = wilson(successes, n) if tasks == n else mean_ci(success, known["task_id"].to_numpy())[1:]
    return {
        "n": n,
        "tasks": tasks,
        "successes": successes,
        "rate": successes / n,
        "ci95": _interval(low, high),
        "reward_mean": known["reward"].mean(),
        "unscored": unscored,
    }


def rise(first: Path, last: Path, threshold: float) -> dict[str, Any]:
    """Held-out rate, last minus first, over the tasks that both have scored, with the paired 95 % interval."""
    before, after = _by_task(first, threshold), _by_task(last, threshold)
    tasks = sorted(before.keys() & after.keys())
    if not tasks:
        raise DataError(f"{first} and {last}: have no scored task in common")
    mean, low, high = paired_difference_ci([before[t] for t in tasks], [after[t] for t in tasks])
    return {"rate": mean, "ci95": _interval(low, high), "n": len(tasks)}


def trained(policy: Path) -> dict[str, Any]:
    """What a training left in its folder: the proof of its tokens, its loss, and how far it began from the sampler."""
    facts = read_run_json(policy) if (policy / "run.json").is_file() else {}
    proof = (facts.get("trained_tokens") or {}).get("batches") or {}
    ratio = facts.get("ratio") or {}
    return {
        "trained_tokens": proof.get("count"),
        "trained_tokens_checksum": proof.get("checksum"),
        "training_loss": _loss(policy / "metrics.jsonl"),
        "ratio_mean": ratio.get("mean"),
        "effective_sample_size": ratio.get("effective_sample_size"),
        "steps": facts.get("steps"),
    }


def _loss(metrics: Path) -> float | None:
    """The mean over the whole training where it was logged, else over the log's entries."""
    losses: list[float] = []
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        try:
            row: Mapping[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue  # a torn last line
        if isinstance(row.get("train_loss"), (int, float)):
            return float(row["train_loss"])
        if isinstance(row.get("loss"), (int, float)):
            losses.append(float(row["loss"]))
    return sum(losses) / len(losses) if losses else None


def _by_task(run: Path, threshold: float) -> dict[str, float]:
    import polars as pl

    reward = pl.col("reward")
    tasks = scan_lazy(run).filter(reward.is_finite()).group_by("task_id").agg((reward > threshold).mean())
    return dict(tasks.collect(engine="streaming").iter_rows())


def _known(scores: pa.Table) -> pl.DataFrame:
    """The rows of task_id and reward that have a finite reward."""
    import polars as pl

    rows = pl.DataFrame(pl.from_arrow(scores.select(["task_id", "reward"])))
    return rows.filter(pl.col("reward").is_finite())


def _interval(low: float, high: float) -> list[float] | None:
    return None if math.isnan(low) else [float(low), float(high)]


#: Heading, and what of a row stands under it.
COLUMNS = (
    ("epoch", "epoch"), ("policy", "policy_version"), ("reward", "reward_mean"), ("95 %", "reward_ci95"),
    ("min", "reward_min"), ("max", "reward_max"), ("rollouts", "rollouts"), ("groups", "groups"),
    ("trained on", "groups_selected"), ("share", "curriculum.current_percentile"), ("tokens trained", "trained_tokens"),
    ("loss", "training_loss"), ("KL to start", "kl_to_start"), ("held-out", "validation.rate"),
    ("95 %", "validation.ci95"),
)  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 72rem; padding: 0 1.5rem; color: #1d2530 }
h1 { font-size: 1.45rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .3rem .65rem; text-align: right; border-bottom: 1px solid #e1e6ec; white-space: nowrap }
th { color: #5b6875; font-weight: 600 } td:last-child, th:last-child { text-align: right }
img { max-width: 100%; border: 1px solid #e1e6ec; border-radius: 6px } .wide { overflow-x: auto }
li { margin: .2rem 0 } code { background: #f2f5f8; padding: .1rem .3rem; border-radius: 3px }
"""


def write_page(path: Path, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], curve: Path) -> None:
    """Write the report of the epochs so far."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{_text(at(row, key))}</td>" for _, key in COLUMNS) + "</tr>" for row in rows)
    image = base64.b64encode(curve.read_bytes()).decode() if curve.is_file() else ""
    before = facts.get("validation_before")
    start = "" if not before else f"<p>Held-out rate before the first epoch: {_text(before.get('rate'))}.</p>"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>finetune {_text(facts.get('run_id'))}</title>"
        f"<style>{_STYLE}</style><h1>Finetuning run <code>{_text(facts.get('run_id'))}</code></h1>{start}"
        f"<img alt='reward, held-out rate and curriculum by epoch' src='data:image/png;base64,{image}'>"
        f"<h2>Epochs</h2><div class=wide><table><tr>{head}</tr>{body}</table></div>"
        f"<h2>What was dropped</h2><ul>{''.join(_left_out(row) for row in rows)}</ul>"
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def at(row: Mapping[str, Any], key: str) -> Any:
    """A value by its dotted key; None when a part of the way is missing."""
    value: Any = row
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


def _left_out(row: Mapping[str, Any]) -> str:
    reasons = [f"{n:,} groups: {why}" for why, n in (row.get("groups_left_out") or {}).items()]
    reasons += [f"{n:,} rollouts: {why.replace('_', ' ')}" for why, n in (row.get("rollouts_left_out") or {}).items()]
    reasons += [
        f"{n:,} pair candidates: {why.replace('_', ' ')}" for why, n in (row.get("pairs_dropped") or {}).items()
    ]
    for name, what in (("unscored", "rollouts without a score"), ("missing", "rollouts missing"),
                       ("too_old_left_out", "rollouts of policies that are too old")):  # fmt: skip
        if row.get(name):
            reasons.append(f"{row[name]:,} {what}")
    if row.get("skipped"):
        reasons.append(f"not trained: {row['skipped']}")
    return f"<li>Epoch {row['epoch']}: {html.escape('; '.join(reasons) or 'nothing')}</li>"


def _text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return " to ".join(_text(one) for one in value)
    return html.escape(str(value))
