"""Judging: each match judged once, its verdict kept by content, and every match accounted for.

Invariants: a verdict that was paid for is never requested again; every match of a schedule ends as judged,
unparsed, refused or failed, and only judged ones have numbers; the same comparison judged again gives the same rows.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from gymdata import genrm
from gymdata.errors import OutsideError, counted
from gymdata.genrm.aggregate import Sizes
from gymdata.genrm.matches import Matches
from gymdata.genrm.schedule import Match
from gymdata.genrm.verdict import Verdict
from gymdata.judge.port import Judge
from gymdata.rollouts.messages import Message
from gymdata.workers.signals import together

STATUSES = ("judged", "unparsed", "refused", "failed")


class Verdicts(Protocol):
    """Where verdicts are kept: ``gymdata.judge.verdict_cache.VerdictCache``."""

    def get(self, key: str) -> Any: ...

    def put(self, key: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One response: its rollout, its index within the group, and its texts."""

    rollout_id: str
    index: int
    answer: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The responses to one conversation. ``candidates`` are in the order that matches number them by."""

    run_id: str
    group_id: str
    task_id: str
    conversation: list[Message]
    candidates: list[Candidate]
    principle: str | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of one match. There is a ``verdict`` exactly when ``status`` is judged, and a ``reason`` otherwise."""

    match: Match
    status: str
    verdict: Verdict | None = None
    raw: str | None = None
    usage: Mapping[str, Any] | None = None
    reason: str | None = None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class VerdictParser:
    """How answers are read and requested again. Published reading fills in the defaults."""

    strict: bool = True
    default_score: float = 3.0
    default_ranking: float = 3.5
    retries: int = 3
    retry_sleep_s: float = 0.2
    #: Retry matches whose saved answer is unparsed.
    retry_unparsed: bool = False

    def read(self, text: str) -> Verdict | None:
        return _read(self, text)


@lru_cache(maxsize=1024)
def _read(reading: VerdictParser, text: str) -> Verdict | None:
    """Cached, because each answer is parsed on arrival and when it is counted, and judges give few distinct answers."""
    if reading.strict:
        return genrm.parse_strict(text)
    return genrm.parse_published(text, reading.default_score, reading.default_ranking)


@dataclass(slots=True)
class Tally:
    """Running totals. ``asked`` counts calls of the judge, ``cached`` matches with a saved verdict."""

    asked: int = 0
    cached: int = 0
    in_flight: int = 0
    by_status: Counter[str] = field(default_factory=Counter)


class PairwiseJudge:
    """Judges matches: from kept verdicts, else by the judge, at most ``concurrency`` calls at a time.

    ``stop_when_gone``: a judge that cannot be reached at all ends everything (OutsideError); without it, the match fails.
    """

    def __init__(
        self,
        judge: Judge,
        kept: Verdicts,
        reading: VerdictParser,
        *,
        seed: int = 0,
        concurrency: int | None = None,
        stop_when_gone: bool = True,
    ) -> None:
        self.judge, self.kept, self.reading, self.seed = judge, kept, reading, seed
        self.stop_when_gone = stop_when_gone
        self.tally = Tally()
        self._room = asyncio.Semaphore(concurrency or judge.default_concurrency)
        self._under_way: dict[str, asyncio.Future[dict[str, Any]]] = {}

    @property
    def judge_name(self) -> str:
        """The judge as comparisons name it."""
        return judge_name(self.judge.identity)

    async def compare(self, comparison: Comparison, matches: Sequence[Match]) -> list[Judged]:
        """Every match, in order."""
        shown = [tidy(genrm.shown(e.answer)) for e in comparison.candidates]
        conversation = [{**m, "content": tidy(genrm.plain_text(m.get("content")))} for m in comparison.conversation]
        principle = None if comparison.principle is None else tidy(comparison.principle)
        # Read here, because a served judge knows its model only once it has started.
        identity = _canonical({**self.judge.identity, "seed": self.seed})
        context = digest(identity, _canonical(conversation), principle or "")
        seen: Counter[str] = Counter()
        work = []
        for match in matches:
            one, two = shown[match.response_i], shown[match.response_j]
            content = digest(context, one, two)
            key = f"{content}-{seen[content]}"
            seen[content] += 1
            work.append(self._judged(match, key, (conversation, one, two, principle)))
        return await together(work)

    async def _judged(self, match: Match, key: str, question: tuple[Any, ...]) -> Judged:
        record = self.kept.get(key)
        cached = record is not None and not (self.reading.retry_unparsed and self._verdict(record) is None)
        if not cached:
            try:
                record = await self._shared(key, question)
            except OutsideError as error:
                if error.fatal and self.stop_when_gone:
                    raise
                status = "failed" if error.retryable or error.fatal else "refused"
                self.tally.by_status[status] += 1
                return Judged(match, status, reason=str(error.message))
        assert record is not None
        self.tally.cached += cached
        judged = self._read(match, record, cached)
        self.tally.by_status[judged.status] += 1
        return judged

    def _read(self, match: Match, record: Mapping[str, Any], cached: bool) -> Judged:
        raw, usage = record["raw"], record.get("usage")
        if record.get("refused"):
            return Judged(match, "refused", None, raw, usage, record["refused"], cached)
        verdict = self._verdict(record)
        if verdict is None:
            reason = f"no verdict in {counted(record['tries'], 'answer')}" if raw.strip() else "empty response"
            return Judged(match, "unparsed", None, raw, usage, reason, cached)
        return Judged(match, "judged", verdict, raw, usage, None, cached)

    def _verdict(self, record: Mapping[str, Any]) -> Verdict | None:
        verdict = self.reading.read(record["raw"])
        finite = verdict is not None and all(
            v is None or np.isfinite(v) for v in (verdict.score_1, verdict.score_2, verdict.ranking)
        )
        return verdict if finite else None

    async def _shared(self, key: str, question: tuple[Any, ...]) -> dict[str, Any]:
        """One call for all identical requests in flight."""
        under_way = self._under_way.get(key)
        if under_way is None:
            under_way = asyncio.ensure_future(self._ask(key, question))
            self._under_way[key] = under_way
            under_way.add_done_callback(lambda done: self._forget(key, done))
        # One caller's cancellation must not cancel the call for the others.
        return await asyncio.shield(under_way)

    def _forget(self, key: str, done: asyncio.Future[dict[str, Any]]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # looked at, so that nothing is logged of it later

    async def _ask(self, key: str, question: tuple[Any, ...]) -> dict[str, Any]:
        conversation, one, two, principle = question
        record: dict[str, Any] = {}
        for attempt in range(self.reading.retries + 1):
            if attempt:
                await asyncio.sleep(self.reading.retry_sleep_s)
            async with self._room:
                self.tally.asked += 1
                self.tally.in_flight += 1
                try:
                    seed = (
                        int.from_bytes(blake2b(f"{self.seed}:{key}:{attempt}".encode(), digest_size=8).digest()) >> 33
                    )
                    answer = await self.judge.compare(conversation, one, two, principle, seed)
                finally:
                    self.tally.in_flight -= 1
            record = {"raw": tidy(answer.text), "usage": answer.usage, "tries": attempt + 1}
            if answer.refused:
                record["refused"] = answer.refused
                break
            if self._verdict(record) is not None:
                break
        self.kept.put(key, record)
        return record

    async def close(self) -> None:
        """Cancel the calls in flight."""
        for task in list(self._under_way.values()):
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)


async def judge_all(
    comparisons: Sequence[Comparison],
    plan: Callable[[int], list[Match]],
    pairwise_judge: PairwiseJudge,
    done: Callable[[int, list[Judged]], None],
    *,
    concurrency: int,
) -> None:
    """Judge every comparison by its ``plan``; ``done`` gets each with its place, in the order in which they end."""
    places = iter(range(len(comparisons)))
    size = max((len(plan(len(c.candidates))) for c in comparisons[:1]), default=1)

    async def worker() -> None:
        for place in places:
            comparison = comparisons[place]
            done(place, await pairwise_judge.compare(comparison, plan(len(comparison.candidates))))

    # More comparisons at once than calls, so that those waiting for a last answer leave no slot empty.
    await together(worker() for _ in range(min(len(comparisons), 2 + 2 * concurrency // max(size, 1))))


def comparison_rows(comparison: Comparison, judged: Sequence[Judged], judge: str) -> list[dict[str, Any]]:
    """Rows of the comparisons table."""
    return [
        {
            "comparison_id": comparison_id(comparison, j.match),
            "group_id": comparison.group_id,
            "task_id": comparison.task_id,
            "rollout_i": comparison.candidates[j.match.response_i].rollout_id,
            "rollout_j": comparison.candidates[j.match.response_j].rollout_id,
            "response_i": comparison.candidates[j.match.response_i].index,
            "response_j": comparison.candidates[j.match.response_j].index,
            "judge_idx": j.match.judge_idx,
            "score_1": j.verdict.score_1 if j.verdict else None,
            "score_2": j.verdict.score_2 if j.verdict else None,
            "ranking": j.verdict.ranking if j.verdict else None,
            "status": j.status,
            "raw": j.raw if j.raw is not None else j.reason,
            "principle": comparison.principle,
            "judge": judge,
            "usage": json.dumps(j.usage) if j.usage else None,
            "run_id": comparison.run_id,
        }
        for j in judged
    ]


def comparison_id(comparison: Comparison, match: Match) -> str:
    """hash(run_id, group_id, i, j, judge_idx), i and j being the responses' indices."""
    i, j = comparison.candidates[match.response_i].index, comparison.candidates[match.response_j].index
    return digest(comparison.run_id, comparison.group_id, str(i), str(j), str(match.judge_idx))


def matches_of(judged: Sequence[Judged]) -> Matches:
    """The columns of one comparison's matches."""
    return Matches.of([(j.match, j.verdict) for j in judged])


def sizes_of(candidates: Sequence[Candidate]) -> Sizes:
    """Lengths and style densities of responses."""
    return Sizes(
        np.array([len(e.reasoning.strip()) for e in candidates], np.int64),
        np.array([len(e.answer.strip()) for e in candidates], np.int64),
        np.array([genrm.style_density(e.answer) for e in candidates], np.float64),
    )


def judge_name(identity: Mapping[str, Any]) -> str:
    """The judge as comparisons name it: model and a hash of everything that makes its verdicts its own."""
    return f"{identity.get('model')}@{digest(_canonical(identity))[:12]}"


def tidy(text: str) -> str:
    """Text that every engine and file takes: lone surrogates, which no encoding has, are replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)


def digest(*parts: str) -> str:
    """A hash of the parts with their lengths, so that moving text from one to another changes it."""
    whole = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        whole.update(b"%d:%b" % (len(data), data))
    return whole.hexdigest()
