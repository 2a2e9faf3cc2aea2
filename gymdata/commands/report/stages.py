"""Figures of stage outputs: pairs, judgements and trained models, and their lineage."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.commands.report.rollouts import histogram, share
from gymdata.public import Figures
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.schema import EXPERIENCES, PAIRS, ROLLOUTS, SCORES, Table, check_version
from gymdata.scores.chosen import scores_of_pairs
from gymdata.store import find_run_json, read_run_json, read_table, resolve, scan_batches
from gymdata.store.lineage import lineage, parent_paths
from gymdata.store.lines import read_metrics
from gymdata.store.paths import RunFacts, Source

METRICS = "metrics.jsonl"
#: Curves worth a look, in their order; the rest of a trainer's log stays in metrics.jsonl.
CURVES = (
    *("loss", "rewards/accuracies", "rewards/margins", "accuracy", "heldout/accuracy"),
    *("ratio/mean", "kl", "entropy", "mean_token_accuracy", "grad_norm", "learning_rate"),
)


def figures(path: Path) -> Figures:
    """``pairs``, ``scores``, ``judge``, ``experiences``, ``training``, ``epochs`` and ``lineage`` of a folder and the stage
    folders in it."""
    folders = [path, *sorted(p.parent for p in path.glob("[!.]*/run.json"))] if path.is_dir() else []
    described = [(folder, read_run_json(folder)) for folder in folders if (folder / "run.json").is_file()]
    return {
        "pairs": list(_pairs(path)),
        "scores": list(_scores(path)),
        "experiences": list(_experiences(path)),
        "judge": [
            {
                "path": str(folder),
                "judge": facts.get("judge"),
                "comparisons": (facts.get("counts") or {}).get("comparisons"),
                "bias": {
                    name: rate | {"ci95": None if None in (rate.get("ci95") or [None]) else rate["ci95"]}
                    for name, rate in (facts.get("bias") or {}).items()
                    if isinstance(rate, dict) and "rate" in rate
                },
            }
            for folder, facts in described
            if facts.get("stage") == "judge"
        ],
        "training": [
            _training(folder, facts)
            for folder, facts in described
            if (folder / METRICS).is_file() and facts.get("stage") != "finetune"
        ],
        "epochs": read_metrics(path / METRICS) if described and described[0][1].get("stage") == "finetune" else [],
        "lineage": [
            {
                "stage": facts.get("stage"),
                "run_id": facts.get("run_id"),
                "command": shlex.join(command),
                "parents": parent_paths(facts),
            }
            for facts in lineage(path)
            for command in [facts.get("command") or ""]
        ],
    }


def _pairs(path: Path) -> Iterator[Figures]:
    for source in _sources(path, PAIRS):
        table = read_table(source.path, PAIRS, ["task_id", "margin", "source", "score", "chosen_mask", "rejected_mask"])
        margin = table["margin"].to_numpy()
        masks = [Ragged.of(table[name]) for name in ("chosen_mask", "rejected_mask")]
        chosen, rejected = (np.diff(np.append(0, np.cumsum(mask.values))[mask.offsets]) for mask in masks)
        yield {
            "path": str(source.path),
            "scores": sorted(scores_of_pairs(table)),
            "pairs": table.num_rows,
            "tasks": len(set(table["task_id"].to_pylist())),
            "margin": {"mean": float(margin.mean()) if len(margin) else None, "histogram": histogram(margin)},
            "chosen_tokens": float(chosen.mean()) if len(chosen) else None,
            "rejected_tokens": float(rejected.mean()) if len(rejected) else None,
            "chosen_longer": share(int((chosen > rejected).sum()), int((chosen != rejected).sum())),
        }


def _scores(path: Path) -> Iterator[Figures]:
    """A summary of each re-scoring or judging, by the name of the score."""
    for source in _sources(path, SCORES):
        table = read_table(source.path, SCORES, ["name", "value", "status"])
        names = np.array(table["name"].to_pylist(), dtype=object)
        values = table["value"].fill_null(math.nan).to_numpy()
        scored = np.array(table["status"].to_pylist(), dtype=object) == "scored"
        for name in sorted(set(names.tolist())):
            mask = scored & (names == name) & np.isfinite(values)
            yield {
                "path": str(source.path),
                "name": name,
                "scored": int(mask.sum()),
                "failed": int(((names == name) & ~mask).sum()),
                "mean": float(values[mask].mean()) if mask.any() else None,
                "histogram": histogram(values[mask]),
            }


def _experiences(path: Path) -> Iterator[Figures]:
    """Sequences, trained tokens, and the mean advantage of a sequence's trained tokens. A sequence without one counts
    among the sequences only."""
    for source in _sources(path, EXPERIENCES):
        described = find_run_json(source.path)
        facts = read_run_json(described) if described is not None else {}
        sequences = tokens = trained = 0
        rollouts, groups, parts = set[str](), set[str](), [np.empty(0)]
        for batch in scan_batches(
            source.path, EXPERIENCES, ("rollout_id", "group_id", "loss_mask", "advantages"), 1_024
        ):
            mask, advantages = (Ragged.of(batch.column(name)) for name in ("loss_mask", "advantages"))
            sequences += batch.num_rows
            rollouts.update(batch.column("rollout_id").to_pylist())
            groups.update(batch.column("group_id").to_pylist())
            tokens += len(mask.values)
            in_loss = mask.values != 0
            trained += int(in_loss.sum())
            owner = mask.owner[in_loss]
            sums = np.bincount(owner, advantages.values[in_loss].astype(np.float64), batch.num_rows)
            counts = np.bincount(owner, minlength=batch.num_rows)
            parts.append(sums[counts > 0] / counts[counts > 0])
        means = np.concatenate(parts)
        yield {
            "path": str(source.path),
            "estimator": facts.get("estimator"),
            "sequences": sequences,
            "rollouts": len(rollouts),
            "groups": len(groups),
            "tokens": tokens,
            "trained_tokens": trained,
            "advantage": {"mean": float(means.mean()) if len(means) else None, "histogram": histogram(means)},
            "positive": share(int((means > 0).sum()), len(means)),
        }


def _sources(path: Path, table: Table) -> list[Source]:
    return resolve(path, table) if path.is_dir() or (path.is_file() and stage_table(path) == table.name) else []


def stage_table(path: Path) -> str | None:
    """The stage table that a Parquet file holds: by its metadata, else by its columns; None for rollouts."""
    from gymdata.store.parquet import schema_of

    if path.suffix != ".parquet" or not path.is_file():
        return None
    schema = schema_of(path)
    name = check_version(schema.metadata, str(path))
    return PAIRS.name if name is None and "chosen" in schema.names else name if name != ROLLOUTS.name else None


def _training(folder: Path, facts: RunFacts) -> Figures:
    rows = read_metrics(folder / METRICS)
    proof = facts.get("trained_tokens") or {}
    means = facts.get("training") or {}
    # What was fed was compared with the file, also where the training ended within its first epoch.
    fed = (proof.get("epochs") or [{}])[-1]
    return {
        "path": str(folder),
        "stage": facts.get("stage"),
        "status": facts.get("status"),
        "steps": facts.get("steps"),
        "trained_tokens": (proof.get("batches") or {}).get("count"),
        "file_tokens": (proof.get("file") or {}).get("count"),
        "tokens_equal": proof.get("equal") or fed.get("equal"),
        # As the training printed them: means of the first and of the last tenth of its steps.
        "first": means.get("first") or {},
        "last": means.get("last") or {},
        # Of several policy versions, how far each was from the model before the first step.
        "ratio_by_version": facts.get("ratio_by_version") or {},
        "curves": {name: points for name in CURVES if (points := curve(rows, "step", name))},
    }


def curve(rows: Sequence[Figures], x: str, name: str) -> list[list[float]]:
    """The points of a number (see ``value_at``) over ``x``; what was not measured is left out."""
    values = [(row[x], value_at(row, name)) for row in rows]
    return [
        [float(position), float(value)]
        for position, value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ]


def value_at(row: Figures, name: str) -> Any:
    """A value of a row, or, where no key has its name, the one inside others at a dotted path; None without one."""
    value: Any = row
    for word in [name] if name in row else name.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value
