"""One contest to rewards, for the compare server: judged, written down, aggregated.

Invariants: every match of the schedule is in the result or among its failures; a response none of whose matches was
judged has no reward here, whatever it is answered later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymdata import genrm
from gymdata.genrm.aggregate import Adjustments
from gymdata.judge.pairwise import Comparison, Judged, PairwiseJudge, comparison_rows, matches_of, sizes_of
from gymdata.judge.settings import ServeConfig
from gymdata.judge.verdict_cache import VerdictLog


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rewards by response (None: nothing of it was judged), and what they rest on."""

    rewards: list[float | None]
    judged: list[Judged]
    metrics: dict[str, float]

    def results(self) -> list[dict[str, Any]]:
        """Judged matches in the published shape."""
        return [
            {**j.match._asdict(), "score_1": j.verdict.score_1, "score_2": j.verdict.score_2, "ranking": j.verdict.ranking}
            for j in self.judged
            if j.verdict is not None
        ]  # fmt: skip

    def failures(self) -> list[dict[str, Any]]:
        """The other matches, with status and reason."""
        return [
            {**j.match._asdict(), "status": j.status, "reason": j.reason} for j in self.judged if j.verdict is None
        ]  # fmt: skip

    def why_none(self, response: int) -> str:
        """Why a response has no reward."""
        mine = [j for j in self.judged if response in j.match[:2] and j.verdict is None]
        counts = Counter(j.status for j in mine)
        said = ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "a ranking without scores"
        first = next((j.reason for j in mine if j.reason), None)
        return f"none of its comparisons gave a score ({said}){f': {first}' if first else ''}"


class RequestQueue:
    """Decides contests with one referee and the server's settings."""

    def __init__(self, config: ServeConfig, pairwise_judge: PairwiseJudge, comparisons: VerdictLog) -> None:
        self.config, self.pairwise_judge, self.comparisons = config, pairwise_judge, comparisons
        self._adjust = Adjustments(**config.adjustments())
        self.decided = 0

    async def decide(self, contest: Comparison) -> Outcome:
        """Judge a contest of two or more. Raises UsageError for fewer."""
        config = self.config
        plan = genrm.schedule(config.comparison_strategy, len(contest.candidates), config.num_judges_per_comparison)
        judged = await self.pairwise_judge.contest(contest, plan)
        for row in comparison_rows(contest, judged, self.pairwise_judge.judge_name):
            # What failed may be judged later under the same id, so only an end is written down.
            if row["status"] != "failed":
                self.comparisons.add(row)
        rewards = genrm.aggregate(
            matches_of(judged),
            len(contest.candidates),
            config.aggregator_method,
            adjust=self._adjust,
            sizes=sizes_of(contest.candidates),
            empty_is_longest=False,
        )
        self.decided += 1
        values = [None if math.isnan(value) else float(value) for value in rewards.reward]
        return Outcome(values, judged, rewards.metrics)

    def figures(self) -> Mapping[str, float]:
        """Running totals for /metrics."""
        tally = self.pairwise_judge.tally
        return {
            "contests_decided_total": self.decided,
            "judge_calls_total": tally.asked,
            "judge_calls_in_flight": tally.in_flight,
            "comparisons_cached_total": tally.cached,
            "comparisons_written": len(self.comparisons),
            **{f'comparisons_total{{status="{status}"}}': n for status, n in sorted(tally.by_status.items())},
        }
