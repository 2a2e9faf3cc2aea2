"""Credit: from rewards to the advantage of every generated token. Numpy in, numpy out, masks everywhere.

Invariants: sums and recursions run in float64; a position whose mask is 0 is stepped over and its result is 0, so
values there (tool tokens, padding, NaN) change nothing; a group of one, or one whose rewards are all equal, gives 0 and
never NaN; a missing or non-finite reward is left out of its group's statistics and its own result is NaN.

Arrays are (B, A) with a mask (B, A); more leading axes are fine. The ``*_ragged`` forms take flat values and offsets,
row i being ``values[offsets[i]:offsets[i + 1]]``, all of it valid. Floats of the caller's precision come back: float32
when every float given is float32, else float64.
"""

from __future__ import annotations

from gymdata.credit.adaptive import Moments, adaptive_kl, running_moments
from gymdata.credit.baselines import TokenBaseline, gradient_energy, optimal_token_baseline, running_baseline
from gymdata.credit.estimators import ESTIMATORS, shape_rewards
from gymdata.credit.masked import (
    clip,
    high_entropy_mask,
    high_entropy_mask_ragged,
    kl,
    last_valid,
    masked_moments,
    normalize_cross_batch,
    token_rewards,
    whiten,
)
from gymdata.credit.recursions import cumulative_returns, cumulative_returns_ragged, discounted_sums, gae, gae_ragged
from gymdata.credit.shaping import (
    DEGENERATE,
    clip_filter_weights,
    cpgd,
    degenerate,
    degenerate_groups,
    dr_grpo,
    gdpo,
    gigpo,
    group_norm,
    grpo,
    maxrl,
    opo,
    optimal_value,
    overlong_penalty,
    pass_at_k,
    reinforce,
    reinforce_baseline,
    rloo,
)

__all__ = [
    "DEGENERATE",
    "ESTIMATORS",
    "Moments",
    "TokenBaseline",
    "adaptive_kl",
    "clip",
    "clip_filter_weights",
    "cpgd",
    "cumulative_returns",
    "cumulative_returns_ragged",
    "degenerate",
    "degenerate_groups",
    "discounted_sums",
    "dr_grpo",
    "gae",
    "gae_ragged",
    "gdpo",
    "gigpo",
    "gradient_energy",
    "group_norm",
    "grpo",
    "high_entropy_mask",
    "high_entropy_mask_ragged",
    "kl",
    "last_valid",
    "masked_moments",
    "maxrl",
    "normalize_cross_batch",
    "opo",
    "optimal_token_baseline",
    "optimal_value",
    "overlong_penalty",
    "pass_at_k",
    "reinforce",
    "reinforce_baseline",
    "rloo",
    "running_baseline",
    "running_moments",
    "shape_rewards",
    "token_rewards",
    "whiten",
]
