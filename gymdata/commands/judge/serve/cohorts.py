"""Gathers the members of a group that arrive one by one, judges them together and answers each with its own reward.

Invariants: a member waits no longer than its cohort's deadline plus judging; a full cohort is closed at once, so a
further member opens another; with group and rollout ids a repeated request joins or repeats its own answer and is never a
second member; an answer that was given is kept and given again, also after a restart; no more members wait than may. Every
match of a schedule is in the result or among its failures; a response none of whose matches was judged has no reward here,
whatever it is answered later.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from gymdata import genrm
from gymdata.commands.judge.pairwise import Candidate, Comparison, Judged, PairwiseJudge, digest, sizes_of
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache, VerdictLog
from gymdata.genrm.matches import Matches
from gymdata.rollouts.messages import JsonObject
from gymdata.texts import REFUSAL, short


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


class RequestQueue:
    """Judges comparisons with the server's settings."""

    def __init__(self, config: ServeConfig, pairwise_judge: PairwiseJudge, comparisons: VerdictLog) -> None:
        self.config, self.pairwise_judge, self.comparisons = config, pairwise_judge, comparisons
        self._adjust = config.adjustments()
        self.decided = 0

    async def decide(self, comparison: Comparison) -> Outcome:
        """Judge a comparison of two or more. Raises UsageError for fewer."""
        judged = await self.pairwise_judge.compare(comparison)
        for row in self.pairwise_judge.rows(comparison, judged):
            # Any other comparison may be judged later under the same id, when a member asks again.
            if row["status"] == "judged":
                self.comparisons.add(row)
        rewards = genrm.aggregate(
            Matches.of([(j.match, j.verdict) for j in judged]),
            len(comparison.candidates),
            self.config.aggregator_method,
            adjust=self._adjust,
            sizes=sizes_of(comparison.candidates),
            empty_is_longest=False,
        )
        self.decided += 1
        values = [None if math.isnan(value) else float(value) for value in rewards.reward]
        return Outcome(values, judged, rewards.metrics)

    def figures(self) -> Mapping[str, float]:
        """Running totals for /metrics."""
        tally = self.pairwise_judge.tally
        return {
            "comparisons_decided_total": self.decided,
            "judge_calls_total": tally.asked,
            "judge_calls_in_flight": tally.in_flight,
            "comparisons_cached_total": tally.cached,
            "comparisons_written": len(self.comparisons),
            **{f'comparisons_total{{status="{status}"}}': n for status, n in sorted(tally.by_status.items())},
        }


class NotAnswered(Exception):  # noqa: N818 - an answer of its own kind, not a defect
    """Why a member gets no reward. ``kind``: cohort_incomplete, judge_failed, conflict, stopping or waiting (too many)."""

    def __init__(self, kind: str, reason: str) -> None:
        reason = short(reason, REFUSAL)
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True, slots=True)
class Member:
    """One request. ``key``: which cohort it belongs to; ``identity``: (group, attempt, rollout), when given; ``index``:
    which rollout of its task it is, when both are given."""

    key: str
    identity: tuple[str, str, str] | None
    comparison: Comparison  # with this one candidate
    index: int | None = None

    @property
    def candidate(self) -> Candidate:
        return self.comparison.candidates[0]

    @property
    def content(self) -> str:
        """What must not change when a request is repeated."""
        return digest(repr(self.comparison.conversation), self.candidate.answer, self.comparison.principle or "")

    @property
    def waiter_key(self) -> tuple[str, ...] | None:
        """Equal for a request and its repetition while the first waits. An index comes again in the next epoch, with
        another response, so it names a waiter only together with the response."""
        if self.identity is None and self.index is not None:
            return (self.key, str(self.index), self.content)
        return self.identity


@dataclass(slots=True)
class _Waiter:
    member: Member
    answer: asyncio.Future[float]


@dataclass(slots=True)
class _Cohort:
    key: str
    number: int
    waiters: list[_Waiter] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Cohorts:
    """Cohorts of ``size`` (≥ 2); ``decide`` judges one; ``answers`` keeps rewards by identity; at most ``max_waiting``
    members wait for others."""

    def __init__(
        self,
        size: int,
        timeout_s: float,
        decide: Callable[[Comparison], Awaitable[Outcome]],
        answers: VerdictCache,
        max_waiting: int,
    ) -> None:
        self.size, self.timeout_s, self._decide, self._answers = size, timeout_s, decide, answers
        self.max_waiting = max_waiting
        self._waiting = 0
        self._stopping: NotAnswered | None = None
        self._open: dict[str, _Cohort] = {}
        self._waiters: dict[tuple[str, ...], _Waiter] = {}
        #: Comparisons that left a member without a reward: its repetition requests again what failed.
        self._unanswered: dict[tuple[str, str, str], Comparison] = {}
        self._numbers: dict[str, int] = {}
        self._judging: set[asyncio.Task[None]] = set()
        self.completed = self.expired = self.failed = 0

    async def join(self, member: Member) -> float:
        """The member's reward. Raises NotAnswered."""
        if self._stopping is not None:
            raise self._stopping
        if (identity := member.identity) is not None:
            saved = self._answers.get(digest(*identity))
            if saved is not None:
                _same(member, saved["content"])
                return float(saved["reward"])
        if member.waiter_key is not None and (waiter := self._waiters.get(member.waiter_key)) is not None:
            _same(member, waiter.member.content)
            return await asyncio.shield(waiter.answer)
        if identity is not None:
            comparison = self._unanswered.get(identity)
            if comparison is not None:
                return await self._again(member, comparison)
        return await asyncio.shield(self._add_waiter(member).answer)

    def waiting(self) -> int:
        """Members in cohorts that are not full."""
        return self._waiting

    def open(self) -> int:
        """Cohorts that are not full."""
        return len(self._open)

    def judging(self) -> int:
        """Full cohorts whose answers are not there yet."""
        return len(self._judging)

    async def close(self, why: str = "the server is stopping", grace_s: float = 0.0) -> None:
        """Refuse every waiting request, and every later one, with the reason. Cohorts that are being judged have
        ``grace_s`` to end."""
        self._stopping = NotAnswered("stopping", why)
        for cohort in list(self._open.values()):
            arrived = f"{why}: {len(cohort.waiters)} of {self.size} members had arrived"
            self._end(cohort, NotAnswered("stopping", arrived))
        if self._judging and grace_s:
            await asyncio.wait(self._judging, timeout=grace_s)
        for task in list(self._judging):
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------------------

    def _add_waiter(self, member: Member) -> _Waiter:
        loop = asyncio.get_running_loop()
        cohort = self._open.get(member.key)
        # The last member of a cohort is always let in: it ends the waiting of the others.
        if self._waiting >= self.max_waiting and (cohort is None or len(cohort.waiters) < self.size - 1):
            raise NotAnswered("waiting", f"{self._waiting:,} members are waiting for the others of their cohorts")
        if cohort is None:
            # How many cohorts of this key there were, also before a restart.
            before = self._numbers.get(member.key, self._answers.get(_count_of(member.key)) or 0)
            number = before if member.identity else 0
            cohort = self._open[member.key] = _Cohort(member.key, number)
            cohort.timer = loop.call_later(self.timeout_s, self._expire, cohort)
        waiter = _Waiter(member, loop.create_future())
        # Mark a fault as retrieved when its caller has disconnected.
        waiter.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        cohort.waiters.append(waiter)
        self._waiting += 1
        if member.waiter_key is not None:
            self._waiters[member.waiter_key] = waiter
        if len(cohort.waiters) == self.size:
            self._close(cohort)
            task = loop.create_task(self._judge(cohort))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)
        return waiter

    def _close(self, cohort: _Cohort) -> None:
        if self._open.get(cohort.key) is cohort:
            del self._open[cohort.key]
            self._waiting -= len(cohort.waiters)
        if cohort.timer is not None:
            cohort.timer.cancel()

    def _expire(self, cohort: _Cohort) -> None:
        self.expired += 1
        reason = f"{len(cohort.waiters)} of {self.size} members arrived within {self.timeout_s:g} s"
        self._end(cohort, NotAnswered("cohort_incomplete", reason))

    def _end(self, cohort: _Cohort, fault: NotAnswered) -> None:
        self._close(cohort)
        for waiter in cohort.waiters:
            self._forget(waiter)
            if not waiter.answer.done():
                waiter.answer.set_exception(fault)

    def _forget(self, waiter: _Waiter) -> None:
        if waiter.member.waiter_key is not None:
            self._waiters.pop(waiter.member.waiter_key, None)

    async def _judge(self, cohort: _Cohort) -> None:
        # By rollout id, so that a group judged again after a restart has the same waiters and finds its verdicts.
        if all(waiter.member.identity for waiter in cohort.waiters):
            cohort.waiters.sort(key=lambda waiter: natural(waiter.member.candidate.rollout_id))
        if cohort.waiters[0].member.identity:
            self._numbers[cohort.key] = cohort.number + 1
        try:
            comparison = self._comparison(cohort)
            outcome = await self._decide(comparison)
            members = {index: waiter.member for index, waiter in enumerate(cohort.waiters)}
            count = self._numbers.get(cohort.key)
            self._keep(comparison, outcome, members, {_count_of(cohort.key): count} if count else {})
        except BaseException as error:
            self.failed += 1
            self._end(cohort, self._stopping or NotAnswered("judge_failed", f"{type(error).__name__}: {error}"))
            if isinstance(error, Exception):  # the waiting requests have it already
                return
            raise
        self.completed += 1
        for index, waiter in enumerate(cohort.waiters):
            self._forget(waiter)
            reward = outcome.rewards[index]
            if waiter.answer.done():
                continue
            if reward is None:
                waiter.answer.set_exception(NotAnswered("judge_failed", outcome.why_none(index)))
            else:
                waiter.answer.set_result(reward)

    def _keep(
        self, comparison: Comparison, outcome: Outcome, members: Mapping[int, Member], counts: JsonObject
    ) -> None:
        """Save the rewards of members by index, and ``counts``, before any of them is answered. All at once: after a kill, a
        member without a saved reward would wait for others that have theirs and do not return."""
        answers = dict(counts)
        for index, member in members.items():
            if member.identity is None:
                continue
            if (reward := outcome.rewards[index]) is not None:
                answers[digest(*member.identity)] = {"reward": reward, "content": member.content}
                self._unanswered.pop(member.identity, None)
            else:
                self._unanswered[member.identity] = comparison
        self._answers.put(answers)

    async def _again(self, member: Member, comparison: Comparison) -> float:
        """Judge a comparison once more for a member that it left without a reward; judged matches are kept."""
        index = next(n for n, e in enumerate(comparison.candidates) if e.rollout_id == member.candidate.rollout_id)
        before = replace(member, comparison=replace(comparison, candidates=[comparison.candidates[index]]))
        _same(member, before.content)
        outcome = await self._decide(comparison)
        self._keep(comparison, outcome, {index: member}, {})
        if (reward := outcome.rewards[index]) is None:
            raise NotAnswered("judge_failed", outcome.why_none(index))
        return reward

    def _comparison(self, cohort: _Cohort) -> Comparison:
        first = cohort.waiters[0].member.comparison
        candidates = [
            Candidate(e.rollout_id or str(n), n, e.answer, e.reasoning)
            for n, e in enumerate(waiter.member.candidate for waiter in cohort.waiters)
        ]
        group = first.group_id
        if not group:
            group = digest(repr(first.conversation), first.principle or "", *(e.answer for e in candidates))
        elif cohort.number:
            group = f"{group}+{cohort.number}"
        return Comparison(first.run_id, group, first.task_id or group, first.conversation, candidates, first.principle)


def _count_of(key: str) -> str:
    return f"cohorts-{key}"


def natural(text: str) -> list[tuple[int, int | str]]:
    """A sort key that puts 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part]


def _same(member: Member, content: str) -> None:
    if member.content != content:
        raise NotAnswered("conflict", "another response was sent before with the same group, attempt and rollout ids")
