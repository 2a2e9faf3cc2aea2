"""Rewards of a file's rollouts, group by group: which groups can teach, and what each rollout is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata import credit
from gymdata.commands.experience.settings import ExperienceConfig

Array = npt.NDArray[Any]
ZERO_VARIANCE, ONE_SCORED, NONE_SCORED = "zero_variance", "one_scored_rollout", "no_scored_rollout"


@dataclass(slots=True)
class Shaped:
    """One entry per rollout: its shaped ``outcome`` and its turns' ``steps`` (None where not used), its ``weight``, and
    whether to ``keep`` it. ``dropped``: reason → codes of the groups that were dropped for it."""

    outcome: Array | None
    steps: Array | None
    weight: Array
    keep: Array
    dropped: dict[str, Array] = field(default_factory=dict)


def shape(
    groups: Array,
    config: ExperienceConfig,
    *,
    outcome: Array | None = None,
    penalty: Array | None = None,
    steps: Array | None = None,
    step_owner: Array | None = None,
    parts: Mapping[str, Array] | None = None,
    lengths: Array | None = None,
) -> Shaped:
    """Zero-variance filter on raw rewards, then overlong penalty, group shaping, running norm and clip.

    ``groups``: a code from 0 for each rollout; ``config``: with a ``zero_variance``; ``outcome``: the raw reward of each
    rollout (NaN: none); ``penalty``: added to it after the filter. ``steps``: the raw reward of every turn (NaN: none),
    ``step_owner``: its rollout's row. Step rewards are shaped against all step rewards of the group ("process supervision"
    of Shao et al. 2024), rloo against those of other rollouts. ``parts``: the named rewards that ``outcome`` is the sum of,
    each compared on its own (gdpo); ``lengths``: generated tokens of each rollout (opo).
    """
    n = len(groups)
    n_groups = int(groups.max()) + 1 if n else 0
    raw, flat = _raw(groups, outcome, steps, step_owner)
    if parts is not None:
        flat = np.all([_flat(part, groups, n_groups) for part in parts.values()], axis=0)
    scored = np.bincount(groups[np.isfinite(raw)], minlength=n_groups)
    reasons: dict[str, Array] = {NONE_SCORED: np.flatnonzero(scored == 0)}
    dropped = scored == 0
    if config.zero_variance == "drop":
        reasons[ONE_SCORED] = np.flatnonzero(flat & (scored == 1))
        reasons[ZERO_VARIANCE] = np.flatnonzero(flat & (scored > 1))
        dropped = dropped | flat
    weight = np.ones(n)
    if config.clip_filter_weights:
        finite = np.isfinite(raw)
        weights = np.ones(n_groups)
        weights[groups[finite]] = credit.clip_filter_weights(
            raw[finite], config.clip_filter_eps, config.clip_filter_lamda, groups[finite]
        )
        weight = weights[groups]
    keep = np.isfinite(raw) & ~dropped[groups]
    shaped_outcome = shaped_steps = None
    if parts is not None:
        parts = {name: np.where(keep, part, np.nan) for name, part in parts.items()}
        shaped_outcome = _limited(credit.gdpo(parts, groups), config)
    elif outcome is not None:
        total = np.where(keep, outcome if penalty is None else outcome + penalty, np.nan)
        shaped_outcome = _limited(
            credit.shape_rewards(total, config.estimator, groups, lengths=lengths, **config.own_settings), config
        )
    if steps is not None and step_owner is not None:
        own = np.where(keep[step_owner], steps, np.nan)
        shaped_steps = _limited(_shape_steps(own, groups, step_owner, config.estimator), config)
    return Shaped(shaped_outcome, shaped_steps, weight, keep, {k: v for k, v in reasons.items() if len(v)})


def _raw(groups: Array, outcome: Array | None, steps: Array | None, owner: Array | None) -> tuple[Array, Array]:
    """One number per rollout, NaN where it has no reward, and which groups have rewards without variance."""
    parts = []
    if outcome is not None:
        parts.append(np.where(np.isfinite(outcome), outcome, np.nan))
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    pooled = np.ones(n_groups, np.bool_)
    if steps is not None and owner is not None:
        has = np.isfinite(steps)
        count = np.bincount(owner[has], minlength=len(groups))
        total = np.bincount(owner[has], weights=steps[has], minlength=len(groups))
        parts.append(np.where(count > 0, total, 0.0 if outcome is not None else np.nan))
        present = np.unique(groups[owner[has]])
        pooled[present] = credit.degenerate_groups(steps[has], groups[owner[has]])
    raw = np.sum(parts, axis=0)
    flat = pooled & _flat(raw, groups, n_groups)
    if outcome is not None and steps is not None:
        flat &= _flat(parts[0], groups, n_groups)
    return raw, flat


def _flat(values: Array, groups: Array, n_groups: int) -> Array:
    result = np.ones(n_groups, np.bool_)
    result[np.unique(groups)] = credit.degenerate_groups(values, groups)
    return result


def _shape_steps(steps: Array, groups: Array, owner: Array, estimator: str) -> Array:
    if estimator != "rloo":
        return credit.shape_rewards(steps, estimator, groups[owner])
    has = np.isfinite(steps)
    of = groups[owner]
    value = np.where(has, steps, 0.0)
    sums, counts = np.bincount(of, weights=value), np.bincount(of, weights=has)
    own, own_count = np.bincount(owner, weights=value), np.bincount(owner, weights=has)
    others = np.maximum(counts[of] - own_count[owner], 1)
    alone = counts[of] == own_count[owner]
    baseline = (sums[of] - own[owner]) / others
    return np.where(has, np.where(alone, 0.0, steps - baseline), np.nan)


def _limited(values: Array, config: ExperienceConfig) -> Array:
    """Normalised, then clipped. Values without variance become 0, for then there is no signal; LightRFT divides by its
    running deviation (``lightrft/trainer/fast_exp_maker.py``), which is over the batches so far."""
    if config.reward_norm != "none":
        finite = np.isfinite(values)
        moments = credit.running_moments(None, values)
        if moments.count < 2 or moments.std <= credit.DEGENERATE * float(np.abs(values[finite]).max()):
            values = np.where(finite, 0.0, values)
        else:
            values = (values - (moments.mean if config.reward_norm == "mean-std" else 0.0)) / moments.std
    return credit.masked.clipped(values, config.reward_clip)
