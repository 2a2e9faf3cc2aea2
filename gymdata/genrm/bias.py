"""How far a judge can be trusted: figures about the judge, each with a 95 % Wilson interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gymdata.genrm.matches import Floats, Ints, Matches, position_inconsistency, winners
from gymdata.stats import wilson


def bias_report(matches: Matches, answer_lengths: Ints | None = None) -> dict[str, dict[str, Any]]:
    """Rates of the judge, each ``{"rate", "count", "n", "ci95"}``; rate and bounds are None where n is 0.

    - ``position_bias``: of decided comparisons, those that the first position won (half of them without bias, when both
      positions are used alike).
    - ``position_inconsistency``: of pairs judged in both positions, those whose winner changed with the positions.
    - ``longer_wins``: of decided comparisons between answers of different length, those that the longer one won.
    - ``ties``: of judged comparisons. ``failures``: of all comparisons.
    - ``judge_agreement``: of two judgements of one comparison (same positions, different judge_idx), those that agree.
    """
    won = winners(matches)
    judged, decided = np.isfinite(won), np.isfinite(won) & (won != 0)
    _, _, flipped = position_inconsistency(matches)
    agree, together = _agreement(matches, won)
    report = {
        "position_bias": _rate((won[decided] > 0).sum(), decided.sum()),
        "position_inconsistency": _rate(flipped.sum(), len(flipped)),
        "ties": _rate((judged & ~decided).sum(), judged.sum()),
        "failures": _rate((~judged).sum(), len(won)),
        "judge_agreement": _rate(agree, together),
    }
    if answer_lengths is not None:
        longer = np.sign(answer_lengths[matches.first] - answer_lengths[matches.second])
        uneven = decided & (longer != 0)
        report["longer_wins"] = _rate((won[uneven] == longer[uneven]).sum(), uneven.sum())
    return report


def against_rewards(matches: Matches, rewards: Floats) -> dict[str, dict[str, Any]]:
    """How often the judge sides with known rewards (one per response, NaN if none), by the better one's position.

    - ``first_position``, ``second_position``: of judged comparisons in which the response in that position has the higher
      reward, those that it won. A tie is not a win. ``both_positions``: of all of these together.
    - ``called_equal``: of judged comparisons of equal rewards, those that the judge called a tie.
    """
    won = winners(matches)
    better = np.sign(rewards[matches.first] - rewards[matches.second])
    comparable = np.isfinite(won) & np.isfinite(better)
    positions = {"first_position": comparable & (better > 0), "second_position": comparable & (better < 0)}
    cases = {**positions, "both_positions": comparable & (better != 0), "called_equal": comparable & (better == 0)}
    return {name: _rate((won[case] == better[case]).sum(), case.sum()) for name, case in cases.items()}


def _rate(count: Any, n: Any) -> dict[str, object]:
    count, n = int(count), int(n)
    low, high = wilson(count, n)
    interval = [None, None] if math.isnan(low) else [low, high]
    return {"rate": count / n if n else None, "count": count, "n": n, "ci95": interval}


def _agreement(matches: Matches, won: np.ndarray) -> tuple[int, int]:
    """Agreeing and all pairs of judgements of one ordered comparison, over what was judged."""
    judged = np.isfinite(won)
    first, second = matches.first[judged], matches.second[judged]
    comparison = first * (int(second.max(initial=0)) + 1) + second

    def pairs(keys: Ints) -> int:
        sizes = np.unique(keys, return_counts=True)[1]
        return int((sizes * (sizes - 1) // 2).sum())

    return pairs(3 * comparison + won[judged].astype(np.int64)), pairs(comparison)
