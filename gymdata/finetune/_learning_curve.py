"""The picture of a finetuning run: reward, held-out rate, the curriculum's share, and how the training went."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

from gymdata.errors import counted, needs
from gymdata.finetune.port import EpochRow
from gymdata.store.run_json import replacing

_REWARD, _HELD_OUT, _LOSS, _KL = "#2f6db3", "#c8553d", "#6b4e9b", "#3a8f6b"
_GREYS = ("#c3ccd6", "#e2e7ec", "#d3c9b8", "#efe9dd")


def draw_curve(path: Path, rows: Sequence[EpochRow], facts: Mapping[str, Any]) -> None:
    """Write a PNG of three panels over the epochs: reward and held-out rate; used and left-out groups, with the
    curriculum's share; loss and KL. A policy's point is at the end of its epoch, what happened in an epoch in its
    middle."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, panels = plt.subplots(
        3, 1, figsize=(8.6, 8.4), sharex=True, height_ratios=[2.3, 1.25, 1], layout="constrained"
    )
    top, middle, bottom = panels
    _reward(top, rows)
    _held_out(top, rows, facts)
    top.set_ylabel("reward, held-out rate")
    bounds = [bound for row in rows for bound in (row["reward_min"], row["reward_max"]) if bound is not None]
    if all(0 <= bound <= 1 for bound in bounds):
        top.set_ylim(0, 1.02)
    top.legend(fontsize=9, loc="lower right", framealpha=0.9)
    algorithm = rows[-1]["algorithm"] if rows else ""
    title = f"{algorithm}, {counted(len(rows), 'epoch')}, run {facts.get('run_id', '')}"
    top.set_title(title, loc="left", fontsize=11)
    _groups(middle, rows)
    kl = bottom.twinx()
    lines: list[tuple[Literal["training_loss", "kl_to_start"], str, str, Any, float]] = [
        ("training_loss", "training loss", _LOSS, bottom, -0.5),
        ("kl_to_start", "KL to the first policy", _KL, kl, -1.0),
    ]
    for name, label, color, on, shift in lines:
        points = [(row["epoch"] + shift, row[name]) for row in rows if _number(row.get(name))]
        on.plot([x for x, _ in points], [y for _, y in points], color=color, marker="o", ms=4, lw=1.6)
        on.set_ylabel(label, color=color, fontsize=9)
        on.tick_params(axis="y", colors=color, labelsize=8)
    kl.spines["top"].set_visible(False)
    for axis in panels:
        axis.grid(alpha=0.25, axis="y")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    bottom.set_xlabel("epoch")
    bottom.set_xlim(-0.15, len(rows) + 0.15)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def write_tensorboard(folder: Path, rows: Sequence[EpochRow]) -> None:
    """Every number of every epoch as TensorBoard events, replacing earlier ones. Raises UsageError without tensorboard."""
    with needs("train,tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        for row in rows:
            for name, value in _numbers(row):
                writer.add_scalar(name, value, row["epoch"])


def _reward(axis: Any, rows: Sequence[EpochRow]) -> None:
    # The rollouts of an epoch are of the policy that it began with, so they are drawn where the epoch before ended.
    points = [(row["epoch"] - 1, row["reward_mean"], row["reward_ci95"]) for row in rows if _number(row["reward_mean"])]
    if not points:
        return
    xs, ys = [x for x, *_ in points], [y for _, y, _ in points]
    axis.plot(
        xs, ys, color=_REWARD, marker="o", lw=2, label="reward of the training rollouts (95 % interval)", zorder=3
    )
    bounded = [(x, bounds) for x, _, bounds in points if bounds]
    if bounded:
        low, high = ([bounds[side] for _, bounds in bounded] for side in (0, 1))
        axis.fill_between([x for x, _ in bounded], low, high, color=_REWARD, alpha=0.18, lw=0)


def _held_out(axis: Any, rows: Sequence[EpochRow], facts: Mapping[str, Any]) -> None:
    start = facts.get("validation_before")
    validations = [(0, start)] if start else []
    validations += [(row["epoch"], row["validation"]) for row in rows if row.get("validation")]
    rated = [(x, validation) for x, validation in validations if validation["rate"] is not None]
    points = [(x, validation["rate"], validation["ci95"]) for x, validation in rated]
    if not points:
        return
    xs, ys = [x for x, *_ in points], [y for _, y, _ in points]
    intervals = [[y - (b[0] if b else y) for _, y, b in points], [(b[1] if b else y) - y for _, y, b in points]]
    n = rated[-1][1]["n"]
    label = f"held-out rate, n = {n:,} (95 % interval)"
    look = {"color": _HELD_OUT, "marker": "s", "ms": 7, "lw": 1.6, "capsize": 4, "zorder": 4}
    axis.errorbar(xs, ys, yerr=intervals, label=label, **look)
    for index, (x, y, _) in enumerate(points):
        if index in (0, len(points) - 1):
            # Beside its point on the inner side, above the error bar's middle.
            side, align = ((10, 12), "left") if index == 0 else ((-8, 7), "right")
            look = {"color": _HELD_OUT, "ha": align, "weight": "bold"}
            axis.annotate(f"{100 * y:.1f} %", (x, y), xytext=side, textcoords="offset points", **look)


def _groups(axis: Any, rows: Sequence[EpochRow]) -> None:
    """Each epoch's groups as a bar: trained on, and left out by reason; and the share that the curriculum allows."""
    reasons = list(dict.fromkeys(why for row in rows for why in row["groups_left_out"]))
    kinds = [("trained on", _REWARD), *zip(reasons, _GREYS * len(reasons), strict=False)]
    below = [0] * len(rows)
    for name, color in kinds:
        counts = [
            row["groups_selected"] if name == "trained on" else row["groups_left_out"].get(name, 0) for row in rows
        ]
        axis.bar([row["epoch"] - 0.5 for row in rows], counts, bottom=below, width=0.82, color=color, label=name)
        if len(rows) <= 12:
            for row, count, under in zip(rows, counts, below, strict=True):
                if count > 0.09 * max(row["groups"], 1):
                    center, color = under + count / 2, "white" if name == "trained on" else "#38424d"
                    look = {"ha": "center", "va": "center", "fontsize": 8, "color": color}
                    axis.text(row["epoch"] - 0.5, center, f"{count:,}", **look)
        below = [under + count for under, count in zip(below, counts, strict=True)]
    axis.set_ylabel("groups")
    handles, labels = axis.get_legend_handles_labels()
    if rows and rows[0]["curriculum"].get("enabled"):
        beside = axis.twinx()
        shares = [row["curriculum"]["current_percentile"] for row in rows]
        label = "curriculum: share of usable groups (right)"
        edges = [0, *(row["epoch"] for row in rows)]
        beside.stairs(shares, edges, baseline=None, color=_HELD_OUT, lw=1.8, ls="--", label=label)
        beside.set_ylim(0, 1.05)
        beside.tick_params(axis="y", colors=_HELD_OUT, labelsize=8)
        beside.spines["top"].set_visible(False)
        more, names = beside.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    axis.legend(handles, labels, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _numbers(row: Mapping[str, object], prefix: str = "") -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for name, value in row.items():
        if _number(value):
            numbers.append((prefix + name, float(value)))
        elif isinstance(value, Mapping):
            numbers += _numbers(value, f"{prefix}{name}/")
    return numbers


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
