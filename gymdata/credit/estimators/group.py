"""Estimators that compare the rewards of a group's rollouts."""

from __future__ import annotations

from typing import Annotated

import numpy.typing as npt
from pydantic import Field

from gymdata.credit.estimators._registry import Array, estimator
from gymdata.credit.shaping import cpgd, dr_grpo, grpo, maxrl, opo, pass_at_k, reinforce_baseline, rloo

estimator(
    "grpo",
    "(r − mean) / (std + 1e-9)",
    "DeepSeekMath, 2402.03300; verl adds 1e-6, TRL 1e-4",
    "the default",
    compares=True,
    standardizes=True,
)(grpo)
_ALIKE = "tasks of different difficulty should not be scaled alike"
estimator("dr-grpo", "r − mean", "2503.20783", _ALIKE, compares=True)(dr_grpo)
estimator(
    "reinforce-baseline", "r − mean", "2501.03262; verl whitens it too, which is `--whiten`", _ALIKE, compares=True
)(reinforce_baseline)
estimator("rloo", "r − mean of the others", "2402.14740", "small groups, unbiased", compares=True)(rloo)
estimator(
    "opo",
    "r − Σ n·r / Σ n, n the generated tokens of a rollout",
    "OPO, 2505.23585",
    "on-policy data; the baseline of least variance where gradients grow with length",
    compares=True,
    alone=False,
)(opo)
estimator(
    "cpgd",
    "(r − mean) / (population std + 1e-6)",
    "CPGD, 2505.12504",
    "as published, with `--clip-filter-weights`",
    compares=True,
    standardizes=True,
    ddof=0,
)(cpgd)
estimator(
    "maxrl",
    "(r − mean) / (mean + 1e-6)",
    "MaxRL, 2602.02710",
    "rewards of 0 or more; hard tasks should weigh more, as in the gradient of the log pass rate",
    compares=True,
    standardizes=True,
    limited=True,
    of_outcomes=True,
)(maxrl)


@estimator(
    "pass-at-k",
    "(1 − ρ)/σ for a success, (1 − ρ − C(n−c−1, k−1)/C(n−1, k−1))/σ for a failure; ρ = 1 − C(n−c, k)/C(n, k), "
    "σ = √(ρ(1 − ρ)) + 1e-6",
    "2508.10751",
    "rewards of 0 and 1; one of `--pass-k` attempts has to succeed: keeps exploration alive",
    compares=True,
    limited=True,
    of_outcomes=True,
    least="pass_k",
)
def _pass_at_k(
    rewards: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    *,
    pass_k: Annotated[int, Field(description="Attempts of which one must succeed, for pass-at-k.", ge=1)] = 4,
) -> Array:
    return pass_at_k(rewards, groups, pass_k)
