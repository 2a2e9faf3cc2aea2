"""Gathers the members of a group that arrive one by one, judges them together and answers each with its own reward.

What always holds: a member waits no longer than its cohort's deadline plus judging; a full cohort is closed at once, so a
further member opens another; with group and rollout ids a repeated request joins or repeats its own answer and is never a
second member; an answer that was given is kept and given again, also after a restart.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from gymdata.serve.desk import Outcome
from gymdata.stages.judge import Contest, Entrant, digest
from gymdata.store.verdicts import Kept


class NotAnswered(Exception):  # noqa: N818 - an answer of its own kind, not a defect
    """Why a member gets no reward. ``kind``: cohort_incomplete, judge_failed or conflict."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True, slots=True)
class Member:
    """One request. ``key``: which cohort it belongs to; ``identity``: (group, attempt, rollout), when given."""

    key: str
    identity: tuple[str, str, str] | None
    contest: Contest  # with this one entrant

    @property
    def entrant(self) -> Entrant:
        return self.contest.entrants[0]

    @property
    def content(self) -> str:
        """What must not change when a request is repeated."""
        return digest(repr(self.contest.conversation), self.entrant.answer, self.contest.principle or "")


@dataclass(slots=True)
class _Seat:
    member: Member
    answer: asyncio.Future[float]


@dataclass(slots=True)
class _Cohort:
    key: str
    number: int
    seats: list[_Seat] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Cohorts:
    """Cohorts of ``size`` (≥ 2); ``decide`` judges one; ``answers`` keeps rewards by identity."""

    def __init__(
        self, size: int, timeout_s: float, decide: Callable[[Contest], Awaitable[Outcome]], answers: Kept
    ) -> None:
        self.size, self.timeout_s, self._decide, self._answers = size, timeout_s, decide, answers
        self._open: dict[str, _Cohort] = {}
        self._seats: dict[tuple[str, str, str], _Seat] = {}
        #: Contests that left a member without a reward: its repetition asks again for what failed.
        self._unanswered: dict[tuple[str, str, str], Contest] = {}
        self._numbers: dict[str, int] = {}
        self._judging: set[asyncio.Task[None]] = set()
        self.completed = self.expired = self.failed = 0

    async def join(self, member: Member) -> float:
        """The member's reward. Raises NotAnswered."""
        if (identity := member.identity) is not None:
            known = self._answers.get(digest(*identity))
            if known is not None:
                _same(member, known["content"])
                return float(known["reward"])
            seat = self._seats.get(identity)
            if seat is not None:
                _same(member, seat.member.content)
                return await asyncio.shield(seat.answer)
            contest = self._unanswered.get(identity)
            if contest is not None:
                return await self._again(member, contest)
        return await asyncio.shield(self._sit(member).answer)

    def waiting(self) -> int:
        """Members in cohorts that are not full."""
        return sum(len(cohort.seats) for cohort in self._open.values())

    def open(self) -> int:
        """Cohorts that are not full."""
        return len(self._open)

    def judging(self) -> int:
        """Full cohorts whose answers are not there yet."""
        return len(self._judging)

    async def close(self) -> None:
        """Answer everybody that nothing will come."""
        for cohort in list(self._open.values()):
            self._end(cohort, NotAnswered("cohort_incomplete", "the server is stopping"))
        for task in list(self._judging):
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------------------

    def _sit(self, member: Member) -> _Seat:
        loop = asyncio.get_running_loop()
        cohort = self._open.get(member.key)
        if cohort is None:
            number = self._numbers.get(member.key, 0) if member.identity else 0
            cohort = self._open[member.key] = _Cohort(member.key, number)
            cohort.timer = loop.call_later(self.timeout_s, self._expire, cohort)
        seat = _Seat(member, loop.create_future())
        # A caller that has hung up leaves nobody to look at a fault.
        seat.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        cohort.seats.append(seat)
        if member.identity is not None:
            self._seats[member.identity] = seat
        if len(cohort.seats) == self.size:
            self._close(cohort)
            task = loop.create_task(self._judge(cohort))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)
        return seat

    def _close(self, cohort: _Cohort) -> None:
        self._open.pop(cohort.key, None)
        if cohort.timer is not None:
            cohort.timer.cancel()

    def _expire(self, cohort: _Cohort) -> None:
        self.expired += 1
        reason = f"{len(cohort.seats)} of {self.size} members arrived within {self.timeout_s:g} s"
        self._end(cohort, NotAnswered("cohort_incomplete", reason))

    def _end(self, cohort: _Cohort, fault: NotAnswered) -> None:
        self._close(cohort)
        for seat in cohort.seats:
            self._forget(seat)
            if not seat.answer.done():
                seat.answer.set_exception(fault)

    def _forget(self, seat: _Seat) -> None:
        if seat.member.identity is not None:
            self._seats.pop(seat.member.identity, None)

    async def _judge(self, cohort: _Cohort) -> None:
        # By rollout id, so that a group judged again after a restart has the same seats and finds its verdicts.
        if all(seat.member.identity for seat in cohort.seats):
            cohort.seats.sort(key=lambda seat: natural(seat.member.entrant.rollout_id))
        if cohort.seats[0].member.identity:
            self._numbers[cohort.key] = cohort.number + 1
        try:
            contest = self._contest(cohort)
            outcome = await self._decide(contest)
        except BaseException as error:
            self.failed += 1
            self._end(cohort, NotAnswered("judge_failed", f"{type(error).__name__}: {error}"))
            if isinstance(error, Exception):  # those who wait have been told; there is nobody else
                return
            raise
        self.completed += 1
        for place, seat in enumerate(cohort.seats):
            self._settle(seat.member, contest, outcome, place, seat)

    def _settle(
        self, member: Member, contest: Contest, outcome: Outcome, place: int, seat: _Seat | None
    ) -> float | None:
        """Keep the reward, then tell whoever waits for it."""
        reward = outcome.rewards[place]
        if member.identity is not None:
            if reward is not None:
                self._answers.put(digest(*member.identity), {"reward": reward, "content": member.content})
                self._unanswered.pop(member.identity, None)
            else:
                self._unanswered[member.identity] = contest
        if seat is not None:
            self._forget(seat)
            if not seat.answer.done():
                if reward is None:
                    seat.answer.set_exception(NotAnswered("judge_failed", outcome.why_none(place)))
                else:
                    seat.answer.set_result(reward)
        return reward

    async def _again(self, member: Member, contest: Contest) -> float:
        """Judge a contest once more for a member that it left without a reward; what was judged is not asked again."""
        place = next(n for n, e in enumerate(contest.entrants) if e.rollout_id == member.entrant.rollout_id)
        before = replace(member, contest=replace(contest, entrants=[contest.entrants[place]]))
        _same(member, before.content)
        outcome = await self._decide(contest)
        reward = self._settle(member, contest, outcome, place, None)
        if reward is None:
            raise NotAnswered("judge_failed", outcome.why_none(place))
        return reward

    def _contest(self, cohort: _Cohort) -> Contest:
        first = cohort.seats[0].member.contest
        entrants = [
            Entrant(e.rollout_id or str(n), n, e.answer, e.reasoning)
            for n, e in enumerate(seat.member.entrant for seat in cohort.seats)
        ]
        group = first.group_id
        if not group:
            group = digest(repr(first.conversation), first.principle or "", *(e.answer for e in entrants))
        elif cohort.number:
            group = f"{group}+{cohort.number}"
        return Contest(first.run_id, group, first.task_id or group, first.conversation, entrants, first.principle)


def natural(text: str) -> list[tuple[int, int | str]]:
    """A sort key that puts 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part]


def _same(member: Member, content: str) -> None:
    if member.content != content:
        raise NotAnswered("conflict", "another response was sent before with the same group, attempt and rollout ids")
