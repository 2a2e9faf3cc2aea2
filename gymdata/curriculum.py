"""Which groups of rollouts an epoch learns from: variance filter, order by difficulty, and a share that grows.

Invariants: the share is a function of the epoch alone, counted in exact decimals; a group whose scores are not all
known and finite never passes a filter that it cannot be judged by; the state names tasks, not positions. The settings and
their names follow the curriculum learning that the NeMo Agent Toolkit documents for its finetuning harness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

import numpy as np
import pydantic

from gymdata.errors import UsageError
from gymdata.settings import Config

#: Rewards such as 0.9 − 0.8 fall short of 0.1 by rounding alone.
_TOLERANCE = 1e-9


class CurriculumConfig(Config):
    """Settings of the curriculum. Percentiles are shares in (0, 1]; ``expansion_interval`` counts epochs."""

    enabled: bool = True
    initial_percentile: float = pydantic.Field(0.3, gt=0.0, le=1.0)
    increment_percentile: float = pydantic.Field(0.2, ge=0.0, le=1.0)
    expansion_interval: int = pydantic.Field(5, ge=1)
    min_reward_diff: float = pydantic.Field(0.1, ge=0.0)
    sort_ascending: bool = False
    random_subsample: float | None = pydantic.Field(None, gt=0.0, le=1.0)
    seed: int = 0


@dataclass(frozen=True)
class GroupStats:
    """The scores of one task's rollouts. Non-finite and missing scores are counted in ``n_unscored``."""

    task_id: str
    n: int
    n_unscored: int
    mean: float
    minimum: float
    maximum: float

    @property
    def score_range(self) -> float:
        """Largest minus smallest score; NaN when no score is known."""
        return self.maximum - self.minimum


@dataclass(frozen=True)
class Selection:
    """The groups that an epoch learns from, and the reasons for the others (task ids, in the order of selection)."""

    included: tuple[str, ...]
    left_out: Mapping[str, str]
    state: Mapping[str, Any]


def group_statistics(scores: Mapping[str, Sequence[float | None]]) -> list[GroupStats]:
    """Statistics of each task's scores, whatever their order; a missing or non-finite score is never counted as 0."""
    groups = []
    for task_id, values in scores.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        least, most = min(known, default=math.nan), max(known, default=math.nan)
        mean = least if least == most or not known else math.fsum(value / len(known) for value in known)
        groups.append(GroupStats(task_id, len(values), len(values) - len(known), mean, least, most))
    return groups


def percentile_at(epoch: int, config: CurriculumConfig) -> Decimal:
    """p(e) = min(1, initial + increment · ⌊(e − 1) / expansion_interval⌋), exactly. Epochs count from 1."""
    if epoch < 1:
        raise UsageError.bad_value("epoch", epoch, "1 or more")
    steps = (epoch - 1) // config.expansion_interval
    share = Decimal(str(config.initial_percentile)) + Decimal(str(config.increment_percentile)) * steps
    return min(Decimal(1), share)


def count_included(n: int, percentile: Decimal) -> int:
    """k = max(1, ⌈n·p⌉), and 0 of 0."""
    if n == 0:
        return 0
    return max(1, int((n * percentile).to_integral_value(rounding=ROUND_CEILING)))


def select_groups(groups: Sequence[GroupStats], epoch: int, config: CurriculumConfig) -> Selection:
    """The groups that ``epoch`` learns from.

    Keeps groups with a score range of ``min_reward_diff`` or more (with a tolerance of 1e-9), orders them by mean score
    (equal means by task id), takes the first ⌈n·p⌉, and of those a seeded random share when ``random_subsample`` is set.
    """
    if not config.enabled:
        ids = tuple(sorted(g.task_id for g in groups))
        return Selection(ids, {}, _state(epoch, config, Decimal(1), len(groups), ids))
    left_out = {g.task_id: "no score is known" for g in groups if math.isnan(g.score_range)}
    least = config.min_reward_diff - _TOLERANCE
    left_out |= {g.task_id: "rewards too alike" for g in groups if g.score_range < least}
    eligible = [g for g in groups if g.task_id not in left_out]
    eligible.sort(key=lambda g: g.task_id)
    eligible.sort(key=lambda g: g.mean, reverse=not config.sort_ascending)
    percentile = percentile_at(epoch, config)
    first = eligible[: count_included(len(eligible), percentile)]
    left_out |= {g.task_id: "beyond the epoch's percentile" for g in eligible[len(first) :]}
    drawn = [g.task_id for g in first]
    if config.random_subsample is not None and drawn:
        n_drawn = count_included(len(drawn), Decimal(str(config.random_subsample)))
        draws = set(np.random.default_rng([config.seed, epoch]).permutation(sorted(drawn))[:n_drawn].tolist())
        drawn = [task for task in drawn if task in draws]
    included = set(drawn)
    left_out |= {g.task_id: "not sampled by random_subsample" for g in first if g.task_id not in included}
    return Selection(tuple(drawn), left_out, _state(epoch, config, percentile, len(groups), drawn))


def _state(
    epoch: int, config: CurriculumConfig, percentile: Decimal, total: int, included: Sequence[str]
) -> dict[str, Any]:
    """JSON that survives a restart; everything in it follows from the epoch and the groups."""
    grew = epoch
    while grew > 1 and percentile_at(grew, config) == percentile_at(grew - 1, config):
        grew -= 1
    return {
        "epoch": epoch,
        "current_percentile": float(percentile),
        "last_expansion_epoch": grew,
        "total_groups": total,
        "included_groups": list(included),
        "config": config.model_dump(),
    }
