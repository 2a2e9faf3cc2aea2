"""Charts as PNG files, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path

from gymdata.errors import needs
from gymdata.report.charts import Chart
from gymdata.store.run_json import replacing

_COLORS = ("#2f6db3", "#c8553d", "#3a8f6b", "#8a5fb0")


def draw(chart: Chart, folder: Path) -> Path:
    """Write ``FOLDER/NAME.png``; returns its path. Raises UsageError without matplotlib."""
    with needs("report"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    if chart.kind == "bars":
        lows = [low for low, *_ in chart.bins]
        widths = [(high - low) or 0.8 for low, high, _ in chart.bins]
        single = all(low == high for low, high, _ in chart.bins)
        axis.bar(lows, [n for *_, n in chart.bins], widths, align="center" if single else "edge", color=_COLORS[0])
    elif chart.kind == "lines":
        for color, (name, points) in zip(_COLORS * len(chart.series), chart.series.items(), strict=False):
            axis.plot([x for x, _ in points], [y for _, y in points], color=color, label=name)
        if len(chart.series) > 1:
            axis.legend(fontsize=8)
    else:
        for row, (_, value, low, high) in enumerate(chart.rates):
            if low is not None and high is not None:
                axis.plot([low, high], [row, row], color=_COLORS[0], alpha=0.5)
            axis.plot([value], [row], "o", color=_COLORS[0])
        axis.set_yticks(range(len(chart.rates)), [name for name, *_ in chart.rates])
        axis.invert_yaxis()
        if chart.bounds:
            axis.set_xlim(*chart.bounds)
    axis.set_title(chart.title, loc="left", fontsize=10)
    axis.set_xlabel(chart.x)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{chart.name}.png"
    with replacing(target) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
    return target
