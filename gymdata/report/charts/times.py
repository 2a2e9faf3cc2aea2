"""How a collection went over time."""

from __future__ import annotations

from collections.abc import Iterator

from gymdata.report.charts import Chart, Figures, chart, lines


@chart("time", section="time")
def time(run: Figures) -> Iterator[Chart]:
    """Tokens per second, and rollouts and failures, by the second in which they ended."""
    points = run["over_time"]
    yield lines("speed", "Tokens per second", {"tokens/s": [(p["s"], p["tokens_per_s"]) for p in points]}, "seconds")
    counts = {
        name: [(p["s"], p[name]) for p in points]
        for name in ("rollouts", "failures")
        if name == "rollouts" or any(p[name] for p in points)
    }
    yield lines("progress", "Rollouts finished", counts, "seconds")
