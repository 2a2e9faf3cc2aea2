"""Rewards: of rollouts, of groups, pass@k, and the named parts."""

from __future__ import annotations

from collections.abc import Iterator

from gymdata.report.charts import Chart, Figures, bars, chart, rates


@chart("rewards", section="rewards")
def rewards(run: Figures) -> Iterator[Chart]:
    """Rewards of rollouts, means of groups of several, pass@k and parts where there are several."""
    if not run["rewards"]["n"]:
        return
    yield bars("rewards", "Rewards of rollouts", run["rewards"]["histogram"], "reward")
    groups = run["rewards"]["groups"]
    if groups["of_several"]:
        yield bars("groups", "Mean reward of groups", groups["means"], "mean reward")
    if len(run["pass_at_k"]) > 1:
        yield rates("pass-at-k", "pass@k", {f"pass@{row['k']}": row for row in run["pass_at_k"]})
    if len(run["rewards"]["parts"]) > 1:
        yield rates("parts", "Reward parts", run["rewards"]["parts"])
