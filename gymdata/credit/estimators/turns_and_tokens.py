"""Estimators that credit parts of the reward, turns or tokens."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from gymdata.credit.baselines import running_baseline
from gymdata.credit.estimators._registry import Array, TurnRewards, estimator
from gymdata.credit.recursions import cumulative_returns_ragged
from gymdata.credit.shaping import gigpo, reinforce
from gymdata.rollouts.ragged import offsets_of

# ``gymdata.experience`` credits the parts, tokens and log-probs of these three; the rollout's reward is left as it is.
estimator(
    "gdpo",
    "Σ over named rewards of (r − mean)/(std + 1e-6), then whitened over the batch",
    "GDPO, 2601.05242",
    "several rewards of different scale (`--reward-parts a,b`; default: all parts)",
    reads="parts",
    compares=True,
    alone=False,
    of_outcomes=True,
    whitens=True,
)(reinforce)
estimator(
    "otb",
    "G − Σ G·W / Σ W over the group's rollouts at the same place; W = Σ up to there of 1 − 2π + Σπ²",
    "2602.07078",
    "long rollouts, small groups",
    compares=True,
    alone=False,
)(reinforce)
estimator(
    "teacher",
    "log π_teacher − log π",
    "[below](#distillation)",
    "a stronger model with the same tokenizer",
    reads="none",
    alone=False,
    of_outcomes=True,
    returns=False,
    discounts=False,
)(reinforce)


@estimator(
    "gigpo",
    "standardized rollout reward + `step_weight` × standardized return of the turn among turns in an equal state",
    "GiGPO, 2505.10978",
    "many turns, states that rollouts of a task come back to",
    by_turn=True,
    compares=True,
    alone=False,
    returns=False,
)
def _gigpo(
    turns: TurnRewards,
    *,
    step_weight: Annotated[
        float,
        Field(
            description="Weight of a turn's advantage relative to its rollout's, in gigpo.", ge=0.0, allow_inf_nan=False
        ),
    ] = 1.0,
) -> Array:
    offsets = offsets_of(np.bincount(turns.owner, minlength=len(turns.groups)))
    filled = np.diff(offsets) > 0
    reward = turns.reward.copy()
    reward[offsets[1:][filled] - 1] += turns.outcome[filled]
    episodes = np.bincount(turns.owner, weights=reward, minlength=len(turns.groups))
    episodes[~turns.kept] = np.nan
    returns = cumulative_returns_ragged(reward, offsets, turns.gamma)
    returns[~turns.kept[turns.owner]] = np.nan
    return gigpo(episodes, returns, turns.owner, turns.state, turns.groups, step_weight)


@estimator(
    "rae",
    "r − running mean of its agent (`baseline_decay`), taken before r enters it",
    "SPIRAL, 2506.24119",
    "several agents or self-play; in the order of the file",
    by_turn=True,
    alone=False,
    returns=False,
    discounts=False,
)
def _rae(
    turns: TurnRewards,
    *,
    baseline_decay: Annotated[
        float, Field(description="Decay of the running baseline of each agent, in rae.", ge=0.0, lt=1.0)
    ] = 0.95,
) -> Array:
    of_agent = turns.owner * (int(turns.agent.max(initial=0)) + 1) + turns.agent
    _, first, of = np.unique(of_agent, return_index=True, return_inverse=True)
    total = np.bincount(of, weights=turns.reward, minlength=len(first)) + turns.outcome[turns.owner[first]]
    total[~turns.kept[turns.owner[first]]] = np.nan
    advantages: Array = running_baseline(total, turns.agent[first], baseline_decay)[of]
    return advantages
