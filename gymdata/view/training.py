"""Curves of trained models, from the metrics.jsonl that a training writes line by line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymdata.public import Figures
from gymdata.store.lineage import parent_paths
from gymdata.store.lines import read_metrics
from gymdata.store.run_json import flat
from gymdata.view.evidence.tables import facts_of

METRICS = "metrics.jsonl"
#: Series that describe the run rather than its progress.
_TOTALS = ("total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")
_BESIDE = frozenset(("step", "epoch", "elapsed_s", *_TOTALS))
#: Panels that are shown first, in this order; every other series has one of its own.
_FIRST = (
    ("loss", ("loss", "eval_loss")),
    ("reward", ("reward", "accuracy", "heldout/accuracy", "validation/accuracy")),
    ("rewards", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    ("preference accuracy", ("rewards/accuracies",)),
    ("ratio", ("ratio/mean", "ratio/clipped")),
    ("KL", ("kl", "kl/sampler", "kl/reference")),
    ("log-probabilities", ("logps/chosen", "logps/rejected")),
    ("logits", ("logits/chosen", "logits/rejected")),
)


def find_metrics(paths: Iterable[Path]) -> list[Path]:
    """Every metrics.jsonl in the given folders and two levels below them."""
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            for pattern in (METRICS, f"*/{METRICS}", f"*/*/{METRICS}"):
                files |= dict.fromkeys(sorted(path.glob(pattern)))
    return list(files)


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


def curves(file: Path) -> Figures:
    """``steps`` and panels of series: name → one value per step, None where it was not logged."""
    by_step: dict[float, Figures] = {}
    for number, row in enumerate(_rows(file), 1):
        step = next((row[name] for name in ("step", "epoch") if name in row), number)
        if _is_number(step):
            by_step.setdefault(float(step), {}).update({k: v for k, v in row.items() if k not in _BESIDE})
    steps = sorted(by_step)
    names = list(dict.fromkeys(name for step in steps for name, value in by_step[step].items() if _is_number(value)))
    rows = [
        {name: float(v) for name, v in by_step[step].items() if _is_number(v) and math.isfinite(v)} for step in steps
    ]
    series = {name: [row.get(name) for row in rows] for name in names}
    grouped = [(title, {name: series.pop(name) for name in of if name in series}) for title, of in _FIRST]
    panels = [{"title": title, "series": group} for title, group in grouped if group]
    panels += [{"title": name, "series": {name: values}} for name, values in series.items()]
    return {"steps": steps, "panels": panels}


def _rows(file: Path) -> list[Figures]:
    """Nested values by path: finetune writes objects of its epochs."""
    return [flat(row, "/") for row in read_metrics(file)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
