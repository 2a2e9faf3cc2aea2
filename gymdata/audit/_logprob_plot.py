"""The picture of an audit: saved against recomputed log-probs, and how far apart they are by position and by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.errors import needs

_POINTS = 20_000
_BLUE, _RED, _GREY = "#2f6db3", "#c8553d", "#8593a1"


def draw(
    path: Path,
    saved: np.ndarray,
    recomputed: np.ndarray,
    positions: Sequence[Mapping[str, Any]],
    turns: Sequence[Mapping[str, Any]],
    tolerance: float,
    title: str,
) -> None:
    """Write a PNG to ``path`` itself. ``positions`` and ``turns``: rows with tokens, mean_abs, max_abs.
    Raises UsageError without matplotlib."""
    with needs("train"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9.6, 7.2), layout="constrained")
    tokens, apart = axes[0]
    points = np.unique(np.linspace(0, len(saved) - 1, _POINTS).astype(np.int64))
    low = float(min(saved[points].min(), recomputed[points].min(), -1e-3))
    tokens.plot([low, 0], [low, 0], color=_GREY, lw=1, zorder=1)
    tokens.plot(recomputed[points], saved[points], ".", ms=2.5, alpha=0.35, color=_BLUE, zorder=2, rasterized=True)
    tokens.set(xlabel="recomputed log-prob", ylabel="saved log-prob")
    # On a logarithmic scale; differences below float32's precision are at the left.
    far = np.maximum(np.abs(saved.astype(np.float64) - recomputed), 1e-7)
    edges = np.geomspace(1e-7, max(float(far.max()) * 1.01, 10 * tolerance), 60)
    apart.hist(far, bins=edges.tolist(), color=_BLUE, alpha=0.8)
    apart.axvline(tolerance, color=_RED, lw=1.2, label=f"tolerance {tolerance:g}")
    apart.set(xscale="log", yscale="log", xlabel="|Δ|", ylabel="tokens")
    apart.legend(fontsize=8)
    _bars(axes[1][0], positions, "positions", "place in the turn's generation", tolerance)
    _bars(axes[1][1], turns, "turns", "turn", tolerance)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, label: str, tolerance: float) -> None:
    ticks = np.arange(len(rows))
    axis.bar(ticks, [max(row["max_abs"], 1e-9) for row in rows], color=_GREY, alpha=0.45, label="largest |Δ|")
    axis.bar(ticks, [max(row["mean_abs"], 1e-9) for row in rows], color=_BLUE, width=0.5, label="mean |Δ|")
    axis.axhline(tolerance, color=_RED, lw=1.2)
    axis.set_yscale("log")
    axis.set_ylim(top=10 * max(axis.get_ylim()[1], tolerance))  # room for the legend
    axis.set_xticks(ticks, [row[name] for row in rows], fontsize=8)
    axis.set_xlabel(label)
    axis.legend(fontsize=8)
