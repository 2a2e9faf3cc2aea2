"""Rewards of single rollouts: R501 and R502."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
R501 no reward (info): the rollout has no reward
Not scored, or masked or failed by its writer, which is named. An error when the run's run.json names a reward and the
rollout was not masked, for then scoring failed; otherwise for information.

R502 reward not finite (error): a reward is NaN or infinite
Means and comparisons over it are lost.
""")


@CHECKS.register("rewards")
class Rewards(Check):
    """Rewards that are missing or not finite."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """R501, R502."""
        if e.reward is not None and e.reward_null is not None:
            for r in map(int, np.flatnonzero(e.reward_null)):
                failure = e.failures.get(r)
                severity = "error" if self.settings.reward_named and failure is None else None
                yield self.at_rollout(e, r, "R501", severity=severity, detail=failure)
            for r in np.flatnonzero(~e.reward_null & ~np.isfinite(e.reward)):
                yield self.at_rollout(e, int(r), "R502", expected="a finite number", got=str(e.reward[r]))
        for r, name, value in e.bad_parts:
            yield self.at_rollout(e, r, "R502", expected="a finite number", got=str(value), detail=f"part {name!r}")
        for k, value in e.bad_steps:
            yield self.at_turn(e, k, "R502", expected="a finite number", got=str(value), detail="reward of the turn")
