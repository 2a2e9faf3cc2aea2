"""Gathers the members of a group that arrive one by one, judges them together and answers each with its own reward.

Invariants: a member waits no longer than its cohort's deadline plus judging; a full cohort is closed at once, so a
further member opens another; with group and rollout ids a repeated request joins or repeats its own answer and is never a
second member; an answer that was given is kept and given again, also after a restart.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gymdata.commands.judge.pairwise import Candidate, Comparison, digest
from gymdata.commands.judge.serve.group_judge import Outcome, unavailable
from gymdata.commands.judge.verdict_cache import VerdictCache
from gymdata.rollouts.messages import JsonObject
from gymdata.workers.serving import Refused


@dataclass(frozen=True, slots=True)
class Member:
    """One request. ``key``: which cohort it belongs to; ``comparison``: with this one candidate; ``identity``: (group,
    attempt, rollout), when given; ``index``: which rollout of its task it is, when both are given."""

    key: str
    comparison: Comparison
    identity: tuple[str, str, str] | None = None
    index: int | None = None

    @property
    def candidate(self) -> Candidate:
        return self.comparison.candidates[0]

    @property
    def content(self) -> str:
        """What must not change when a request is repeated."""
        return digest(repr(self.comparison.conversation), self.candidate.answer, self.comparison.principle or "")

    @property
    def repeat_key(self) -> str | None:
        """Equal for a request and its repetition. An index comes again in the next epoch, with another response, so it names
        a request only together with the response, and only while that waits."""
        if self.identity is not None:
            return digest(*self.identity)
        return None if self.index is None else digest(self.key, str(self.index), self.content)

    def refuse_other(self, content: str) -> None:
        """Raises Refused unless this is what was sent before with the same ids."""
        if self.content != content:
            reason = "another response was sent before with the same group, attempt and rollout ids"
            raise Refused(409, {"detail": reason, "kind": "conflict"})


@dataclass(slots=True)
class _Waiter:
    member: Member
    reward: asyncio.Future[float]


@dataclass(slots=True)
class _Cohort:
    key: str
    deadline: asyncio.TimerHandle
    waiters: list[_Waiter] = field(default_factory=list)


class Cohorts:
    """Cohorts of ``size`` (≥ 2); ``judge`` judges one; ``answers`` keeps rewards by identity."""

    def __init__(
        self,
        size: int,
        timeout_s: float,
        judge: Callable[[Comparison], Awaitable[Outcome]],
        answers: VerdictCache,
    ) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._judge, self._answers = judge, answers
        self._stopping: str | None = None
        self._open: dict[str, _Cohort] = {}
        #: Who waits for a reward, by repeat key.
        self._waiters: dict[str, _Waiter] = {}
        #: By repeat key: the cohort in which a member got no reward, and the member.
        self._unrewarded: dict[str, tuple[Comparison, Member]] = {}
        #: Cohorts of each key so far.
        self._numbers: dict[str, int] = {}
        self._judging: set[asyncio.Task[None]] = set()
        self.completed = self.expired = self.failed = 0

    async def join(self, member: Member) -> float:
        """The member's reward. Raises Refused."""
        if self._stopping is not None:
            raise unavailable("stopping", self._stopping)
        waiter, repeat_key = None, member.repeat_key
        if repeat_key is not None:
            answer = self._answers.get(repeat_key)
            if answer is not None:
                member.refuse_other(answer["content"])
                return float(answer["reward"])
            waiter = self._waiters.get(repeat_key) or self._judged_again(member, repeat_key)
        if waiter is None:
            waiter = self._admit(member)
        member.refuse_other(waiter.member.content)
        # One caller that goes must not end the answer of its repetition.
        return await asyncio.shield(waiter.reward)

    def waiting(self) -> int:
        """Members in cohorts that are not full."""
        return sum(len(cohort.waiters) for cohort in self._open.values())

    def open(self) -> int:
        """Cohorts that are not full."""
        return len(self._open)

    def judging(self) -> int:
        """Full cohorts whose answers are not there yet."""
        return len(self._judging)

    def close(self, why: str) -> None:
        """Refuse every member that waits for others, and every later one, with the reason."""
        self._stopping = why
        for cohort in list(self._open.values()):
            arrived = f"{why}: {len(cohort.waiters)} of {self.size} members had arrived"
            self._end(cohort)
            self._refuse(cohort.waiters, unavailable("stopping", arrived))

    # ------------------------------------------------------------------------------------------------------------------

    def _admit(self, member: Member) -> _Waiter:
        """A place in the open cohort of its key, or in a new one. The last member starts the judging."""
        cohort = self._open.get(member.key)
        if cohort is None:
            deadline = asyncio.get_running_loop().call_later(self.timeout_s, self._expire, member.key)
            cohort = self._open[member.key] = _Cohort(member.key, deadline)
        waiter = self._waiter(member)
        cohort.waiters.append(waiter)
        if len(cohort.waiters) == self.size:
            self._end(cohort)
            self._judge_full(cohort)
        return waiter

    def _waiter(self, member: Member) -> _Waiter:
        waiter = _Waiter(member, asyncio.get_running_loop().create_future())
        # Mark a fault as retrieved when its caller has disconnected.
        waiter.reward.add_done_callback(lambda done: done.cancelled() or done.exception())
        if (repeat_key := member.repeat_key) is not None:
            self._waiters[repeat_key] = waiter
            waiter.reward.add_done_callback(lambda _: self._waiters.pop(repeat_key, None))
        return waiter

    def _expire(self, key: str) -> None:
        cohort = self._open[key]
        self.expired += 1
        reason = f"{len(cohort.waiters)} of {self.size} members arrived within {self.timeout_s:g} s"
        self._end(cohort)
        self._refuse(cohort.waiters, unavailable("cohort_incomplete", reason))

    def _end(self, cohort: _Cohort) -> None:
        """Let nobody join it any more."""
        del self._open[cohort.key]
        cohort.deadline.cancel()

    def _refuse(self, waiters: Iterable[_Waiter], refused: Refused) -> None:
        for waiter in waiters:
            if not waiter.reward.done():
                waiter.reward.set_exception(refused)

    def _judge_full(self, cohort: _Cohort) -> None:
        """Begin to judge all members. Their group is the one they name, with a number where others had it before."""
        waiters, group = cohort.waiters, ""
        records: JsonObject = {}
        if all(waiter.member.identity for waiter in waiters):
            # By rollout id, so that a group judged again after a restart has the same order and finds its verdicts.
            waiters.sort(key=lambda waiter: natural(waiter.member.candidate.rollout_id))
            count_key = f"cohorts-{cohort.key}"
            number = self._numbers.get(cohort.key, self._answers.get(count_key) or 0)
            self._numbers[cohort.key] = records[count_key] = number + 1
            group = waiters[0].member.comparison.group_id + (f"+{number}" if number else "")
        first = waiters[0].member.comparison
        candidates = [waiter.member.candidate for waiter in waiters]
        candidates = [replace(c, rollout_id=c.rollout_id or str(n), index=n) for n, c in enumerate(candidates)]
        group = group or digest(repr(first.conversation), first.principle or "", *(c.answer for c in candidates))
        comparison = replace(first, group_id=group, task_id=first.task_id or group, candidates=candidates)
        self._start(comparison, dict(enumerate(waiters)), records)

    def _judged_again(self, member: Member, repeat_key: str) -> _Waiter | None:
        """Begin to judge the cohort of a member that got no reward once more, for it alone; what was judged is kept."""
        if repeat_key not in self._unrewarded:
            return None
        comparison, before = self._unrewarded[repeat_key]
        member.refuse_other(before.content)
        waiter = self._waiter(member)
        ids = [candidate.rollout_id for candidate in comparison.candidates]
        self._start(comparison, {ids.index(member.candidate.rollout_id): waiter}, {})
        return waiter

    def _start(self, comparison: Comparison, waiters: Mapping[int, _Waiter], records: JsonObject) -> None:
        """Judge in a task of its own for the waiters, by the number of their candidate."""
        task = asyncio.ensure_future(self._answer(comparison, waiters, records))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)

    async def _answer(self, comparison: Comparison, waiters: Mapping[int, _Waiter], records: JsonObject) -> None:
        try:
            outcome = await self._judge(comparison)
            # Before any of them is answered, and all at once: after a kill, a member without a saved reward would wait for
            # others that have theirs and do not return.
            self._answers.put({**records, **self._rewards_to_save(comparison, outcome, waiters)})
        except Exception as error:  # noqa: BLE001 - whatever it is, the requests that wait are answered with it
            self.failed += 1
            reason = f"{type(error).__name__}: {error}"
            self._refuse(waiters.values(), error if isinstance(error, Refused) else unavailable("judge_failed", reason))
            return
        self.completed += 1
        for index, waiter in waiters.items():
            reward = outcome.rewards[index]
            if reward is None:
                self._refuse([waiter], unavailable("judge_failed", outcome.why_none(index)))
            else:
                waiter.reward.set_result(reward)

    def _rewards_to_save(self, comparison: Comparison, outcome: Outcome, waiters: Mapping[int, _Waiter]) -> JsonObject:
        """The rewards of members with an identity, as they are saved. Remembers those that have none."""
        records: JsonObject = {}
        for index, waiter in waiters.items():
            member, reward = waiter.member, outcome.rewards[index]
            if member.identity is None:
                continue
            repeat_key = digest(*member.identity)
            if reward is None:
                self._unrewarded[repeat_key] = comparison, member
            else:
                self._unrewarded.pop(repeat_key, None)
                records[repeat_key] = {"reward": reward, "content": member.content}
        return records


def natural(text: str) -> list[tuple[int, int | str]]:
    """A sort key that puts 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part]
