"""Judges a group of responses with the server's settings, and keeps the comparisons.

Invariants: every match of a schedule is in the result or among its failures; a response none of whose matches was judged
has no reward here, whatever it is answered later; what is being judged when the server stops ends with the reason.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

from gymdata import genrm
from gymdata.commands.judge.pairwise import Comparison, Judged, PairwiseJudge, sizes_of
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictLog
from gymdata.genrm.matches import Matches
from gymdata.rollouts.messages import JsonObject
from gymdata.workers.serving import Refused


def unavailable(kind: str, reason: str) -> Refused:
    """No reward: ``kind`` is cohort_incomplete, judge_failed or stopping."""
    return Refused(503, {"detail": reason, "kind": kind})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rewards by response (None: no match of it was judged), and the comparisons behind them."""

    rewards: list[float | None]
    judged: list[Judged]
    metrics: dict[str, float]

    def results(self) -> list[JsonObject]:
        """Judged matches in the published shape."""
        verdicts = [(j.match, j.verdict) for j in self.judged if j.verdict is not None]
        return [
            {**match._asdict(), "score_1": v.score_1, "score_2": v.score_2, "ranking": v.ranking}
            for match, v in verdicts
        ]

    def failures(self) -> list[JsonObject]:
        """The other matches, with status and reason."""
        return [{**j.match._asdict(), "status": j.status, "reason": j.reason} for j in self.judged if j.verdict is None]

    def why_none(self, response: int) -> str:
        """Why a response has no reward."""
        matches = [j for j in self.judged if response in j.match[:2] and j.verdict is None]
        counts = Counter(j.status for j in matches)
        reasons = ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "a ranking without scores"
        first = next((j.reason for j in matches if j.reason), None)
        return f"none of its comparisons gave a score ({reasons}){f': {first}' if first else ''}"


class GroupJudge:
    """``pairwise`` judges the matches; ``comparisons`` gets those that were judged."""

    def __init__(self, config: ServeConfig, pairwise: PairwiseJudge, comparisons: VerdictLog) -> None:
        self.config, self.pairwise, self.comparisons = config, pairwise, comparisons
        self.decided = 0
        self._stopping: str | None = None
        self._judging: set[asyncio.Task[list[Judged]]] = set()

    async def judge(self, comparison: Comparison) -> Outcome:
        """Judge two or more responses. Raises Refused when the server stops, UsageError for fewer."""
        if self._stopping is not None:
            raise unavailable("stopping", self._stopping)
        judging = asyncio.ensure_future(self.pairwise.compare(comparison))
        self._judging.add(judging)
        try:
            judged = await judging
        except asyncio.CancelledError:
            if self._stopping is None:
                raise
            raise unavailable("stopping", self._stopping) from None
        finally:
            self._judging.discard(judging)
        for row in self.pairwise.rows(comparison, judged):
            # Any other comparison may be judged later under the same id, when a member asks again.
            if row["status"] == "judged":
                self.comparisons.add(row)
        rewards = genrm.aggregate(
            Matches.of([(j.match, j.verdict) for j in judged]),
            len(comparison.candidates),
            self.config.aggregator_method,
            adjust=self.config.adjustments(),
            sizes=sizes_of(comparison.candidates),
            empty_is_longest=False,
        )
        self.decided += 1
        return Outcome([None if math.isnan(r) else float(r) for r in rewards.reward], judged, rewards.metrics)

    async def stop(self, why: str, grace_s: float) -> None:
        """End with the reason what is not judged ``grace_s`` from now, and everything later at once."""
        self._stopping = why
        if self._judging:
            await asyncio.wait(self._judging, timeout=grace_s)
        for judging in self._judging:
            judging.cancel()

    def figures(self) -> dict[str, float]:
        """Running totals for /metrics."""
        tally = self.pairwise.tally
        return {
            "comparisons_decided_total": self.decided,
            "judge_calls_total": tally.asked,
            "judge_calls_in_flight": tally.in_flight,
            "comparisons_cached_total": tally.cached,
            "comparisons_written": len(self.comparisons),
            **{f'comparisons_total{{status="{status}"}}': n for status, n in sorted(tally.by_status.items())},
        }
