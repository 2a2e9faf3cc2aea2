"""Estimators that leave the reward of a rollout as it is."""

from __future__ import annotations

from gymdata.credit.estimators._registry import estimator
from gymdata.credit.shaping import reinforce

estimator("reinforce", "G", "Williams 1992", "single rollouts")(reinforce)
estimator("gae", "GAE(γ, λ) with a critic", "1506.02438", "single rollouts; long ones with `train-value`")(reinforce)
estimator(
    "reinforce++",
    "G, then whitened over all tokens of the file",
    "REINFORCE++, 2501.03262",
    "single rollouts per task; with `--reference` and `--kl-coef` as published",
    whitens=True,
)(reinforce)
estimator(
    "remax",
    "r − reward of the greedy rollout of the task",
    "ReMax, 2310.10505",
    "single rollouts; `--baseline RUN` is a scored run with temperature 0",
    baseline=True,
    of_outcomes=True,
)(reinforce)
