"""Lengths of rollouts, and log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Iterator

from gymdata.report.charts import Chart, Figures, bars, chart


@chart("sizes", section="sizes")
def sizes(run: Figures) -> Iterator[Chart]:
    """Sampled tokens and turns per rollout, and log-probabilities."""
    lengths = run["lengths"]
    if lengths:
        yield bars("tokens", "Generated tokens per rollout", lengths["generated"]["histogram"], "tokens")
        yield bars("turns", "Turns per rollout", lengths["turns"]["histogram"], "turns")
    yield bars("logprobs", "Log-probabilities of sampled tokens", run["logprobs"]["histogram"], "log-probability")
