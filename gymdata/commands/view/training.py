"""Curves of trained models, from the metrics.jsonl that a training writes line by line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymdata.commands.report.charts import Chart, lines
from gymdata.commands.view.evidence.tables import facts_of
from gymdata.public import Figures
from gymdata.store.lineage import parent_paths
from gymdata.store.lines import read_metrics
from gymdata.store.run_json import flat

METRICS = "metrics.jsonl"
#: Series that describe the run rather than its progress.
_TOTALS = ("total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")
_BESIDE = frozenset(("step", "epoch", "elapsed_s", *_TOTALS))
#: Charts that are shown first, in this order; every other series has one of its own.
_FIRST = {
    "loss": ("loss", "eval_loss"),
    "reward": ("reward", "accuracy", "heldout/accuracy", "validation/accuracy"),
    "rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "preference accuracy": ("rewards/accuracies",),
    "ratio": ("ratio/mean", "ratio/clipped"),
    "KL": ("kl", "kl/sampler", "kl/reference"),
    "log-probabilities": ("logps/chosen", "logps/rejected"),
    "logits": ("logits/chosen", "logits/rejected"),
}


def find_metrics(paths: Iterable[Path]) -> list[Path]:
    """Every metrics.jsonl in the given folders and two levels below them."""
    patterns = (METRICS, f"*/{METRICS}", f"*/*/{METRICS}")
    files = (file for path in paths if path.is_dir() for pattern in patterns for file in sorted(path.glob(pattern)))
    return list(dict.fromkeys(files))


def described(file: Path) -> Figures:
    """A summary of a training: its folder, kind, settings in a line, and progress."""
    facts = facts_of(file.parent)
    config = facts.get("config") or {}
    rows = _rows(file)
    model = config.get("model") or (facts.get("model") or {}).get("path")
    return {
        "folder": str(file.parent),
        "stage": str(facts.get("stage") or ("finetune" if "epoch" in (rows[-1] if rows else {}) else "training")),
        "model": model if isinstance(model, str) else None,
        "status": facts.get("status"),
        "steps": max((int(row["step"]) for row in rows if _is_number(row.get("step"))), default=0),
        "planned": (facts.get("settings") or config.get("trainer") or {}).get("max_steps") or facts.get("steps"),
        "seconds": max((row["elapsed_s"] for row in rows if _is_number(row.get("elapsed_s"))), default=None),
        "parents": parent_paths(facts),
    }


def curves(file: Path) -> list[Chart]:
    """A chart for each number that the training wrote, or for several of a kind. What is not finite was not measured, and of
    a step that came twice the later counts."""
    series: dict[str, dict[float, float]] = {}
    for number, row in enumerate(_rows(file), 1):
        step = next((row[name] for name in ("step", "epoch") if name in row), number)
        for name, value in row.items() if _is_number(step) else ():
            if name not in _BESIDE and _is_number(value):
                series.setdefault(name, {})[float(step)] = float(value)
    points = {name: sorted(values.items()) for name, values in series.items()}
    grouped = {title: {name: points.pop(name) for name in names if name in points} for title, names in _FIRST.items()}
    charts = grouped | {name: {name: values} for name, values in points.items()}
    return [lines(title, title, of, "step") for title, of in charts.items() if of]


def _rows(file: Path) -> list[Figures]:
    """Nested values by path: finetune writes objects of its epochs."""
    return [flat(row, "/") for row in read_metrics(file)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
