"""Estimators that credit parts of the reward, turns or tokens: the rollout's reward is left as it is here, and
``gymdata.experience`` calls the functions of ``gymdata.credit`` that are named as they are."""

from __future__ import annotations

from gymdata.credit.estimators._registry import estimator
from gymdata.credit.shaping import reinforce

estimator(
    "gdpo", "Σ over named rewards of (r − mean)/(std + 1e-6), then whitened over the batch", "GDPO, 2601.05242",
    "several rewards of different scale (`--reward-parts a,b`; default: all parts)",
    compares=True, plain=False, of_outcomes=True, whitens=True,
)(reinforce)  # fmt: skip
estimator(
    "gigpo", "standardized rollout reward + `step_weight` × standardized return of the turn among turns in an equal state",
    "GiGPO, 2505.10978", "many turns, states that rollouts of a task come back to",
    compares=True, plain=False, returns=False,
)(reinforce)  # fmt: skip
estimator(
    "otb", "G − Σ G·W / Σ W over the group's rollouts at the same place; W = Σ up to there of 1 − 2π + Σπ²", "2602.07078",
    "long rollouts, small groups", compares=True, plain=False,
)(reinforce)  # fmt: skip
estimator(
    "rae", "r − running mean of its agent (`baseline_decay` 0.95), taken before r enters it", "SPIRAL, 2506.24119",
    "several agents or self-play; in the order of the file", plain=False, returns=False,
)(reinforce)  # fmt: skip
estimator(
    "teacher", "log π_teacher − log π", "[below](#distillation)", "a stronger model with the same tokenizer",
    plain=False, of_outcomes=True, returns=False,
)(reinforce)  # fmt: skip
