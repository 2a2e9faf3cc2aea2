"""Judging: each match judged once, its verdict kept by content, and every match accounted for.

Invariants: a verdict that was paid for is never requested again; every match of a schedule ends as judged,
unparsed, refused or failed, and only judged ones have numbers; the same comparison judged again gives the same rows.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from gymdata import genrm
from gymdata.commands.judge.port import Judge
from gymdata.commands.judge.settings import GenrmConfig
from gymdata.commands.judge.verdict_cache import VerdictCache
from gymdata.errors import DataError, OutsideError, counted
from gymdata.genrm.aggregate import Sizes
from gymdata.genrm.schedule import Match
from gymdata.genrm.verdict import Verdict
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.store.paths import Facts
from gymdata.workers.signals import together

STATUSES = ("judged", "unparsed", "refused", "failed")


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
    usage: JsonObject | None = None
    reason: str | None = None


@dataclass(slots=True)
class Tally:
    """Running totals. ``asked`` counts calls of the judge, ``cached`` matches with a saved verdict."""

    asked: int = 0
    cached: int = 0
    in_flight: int = 0
    by_status: Counter[str] = field(default_factory=Counter)


class PairwiseJudge:
    """Judges comparisons by the schedule of ``config``, for files and for the server: each match from kept verdicts, else by
    the judge, at most ``concurrency`` calls at a time. The judge is started with the first call, so that nothing to judge
    starts no engine; ``facts``: what it says of itself, once it has started.

    ``retry_unparsed``: also matches whose kept answer has no verdict. ``stop_when_gone``: a judge that cannot be reached at
    all ends everything (OutsideError); without it, the match fails.
    """

    def __init__(
        self, config: GenrmConfig, judge: Judge, verdicts: VerdictCache, *, retry_unparsed: bool, stop_when_gone: bool
    ) -> None:
        self.config, self.judge, self.verdicts = config, judge, verdicts
        self.retry_unparsed, self.stop_when_gone = retry_unparsed, stop_when_gone
        self.tally = Tally()
        self.concurrency = config.concurrency or judge.default_concurrency
        self.facts: Facts = {}
        self._room = asyncio.Semaphore(self.concurrency)
        self._under_way: dict[str, asyncio.Future[JsonObject]] = {}
        self._starting: asyncio.Future[Facts] | None = None

    @property
    def judge_name(self) -> str:
        """The judge as comparisons name it: model and a hash of everything that makes its verdicts its own."""
        identity = self.judge.identity
        return f"{identity.get('model')}@{digest(_canonical(identity))[:12]}"

    async def start(self) -> None:
        """Start the judge, if that was not done before."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.judge.start())
        self.facts = await asyncio.shield(self._starting)

    def plan(self, comparison: Comparison) -> list[Match]:
        """The matches of a comparison. Raises UsageError for fewer than two candidates."""
        config, n = self.config, len(comparison.candidates)
        return genrm.schedule(config.comparison_strategy, n, config.num_judges_per_comparison)

    async def compare_all(self, comparisons: Sequence[Comparison], done: Callable[[int, list[Judged]], None]) -> None:
        """``compare`` each; ``done`` gets the results with their comparison's number, in the order in which they end."""
        numbers = iter(range(len(comparisons)))

        async def worker() -> None:
            for number in numbers:
                done(number, await self.compare(comparisons[number]))

        # More comparisons at once than calls, so that those waiting for a last answer leave no slot empty.
        size = max([len(self.plan(comparison)) for comparison in comparisons[:1]], default=1)
        await together(worker() for _ in range(min(len(comparisons), 2 + 2 * self.concurrency // max(size, 1))))

    async def compare(self, comparison: Comparison) -> list[Judged]:
        """Every match of its schedule, in order."""
        shown = [tidy(genrm.shown(e.answer)) for e in comparison.candidates]
        conversation = [{**m, "content": tidy(genrm.plain_text(m.get("content")))} for m in comparison.conversation]
        principle = None if comparison.principle is None else tidy(comparison.principle)
        # Read here, because a served judge knows its model only once it has started.
        identity = _canonical({**self.judge.identity, "seed": self.config.seed})
        context = digest(identity, _canonical(conversation), principle or "")
        seen: Counter[str] = Counter()
        work = []
        for match in self.plan(comparison):
            answer_1, answer_2 = shown[match.response_i], shown[match.response_j]
            content = digest(context, answer_1, answer_2)
            key = f"{content}-{seen[content]}"
            seen[content] += 1
            work.append(self._judged(match, key, (conversation, answer_1, answer_2, principle)))
        return await together(work)

    async def _judged(self, match: Match, key: str, question: tuple[Any, ...]) -> Judged:
        record = self.verdicts.get(key)
        if record is not None and not (self.retry_unparsed and self._verdict(record) is None):
            self.tally.cached += 1
            judged = self._read(match, record)
        else:
            try:
                tries = 0 if record is None else record["tries"]
                judged = self._read(match, await self._shared(key, question, tries))
            except (OutsideError, DataError) as error:
                gone = isinstance(error, OutsideError) and error.fatal
                if gone and self.stop_when_gone:
                    raise
                # What its prompt cannot be made of is refused, as what the judge refuses.
                passing = gone or (isinstance(error, OutsideError) and error.retryable)
                judged = Judged(match, "failed" if passing else "refused", reason=str(error.message))
        self.tally.by_status[judged.status] += 1
        return judged

    def _read(self, match: Match, record: JsonObject) -> Judged:
        raw, usage = record["raw"], record.get("usage")
        if record.get("refused"):
            return Judged(match, "refused", None, raw, usage, record["refused"])
        verdict = self._verdict(record)
        if verdict is not None:
            return Judged(match, "judged", verdict, raw, usage)
        reason = f"no verdict in {counted(record['tries'], 'answer')}" if raw.strip() else "empty response"
        if (finish_reason := record.get("finish_reason")) not in (None, "stop"):
            reason += f" (finish_reason {finish_reason})"
        return Judged(match, "unparsed", None, raw, usage, reason)

    def _verdict(self, record: JsonObject) -> Verdict | None:
        """The verdict of an answer, by the rule of the settings; None where a number is not finite."""
        text, config = record["raw"], self.config
        if config.verdicts == "last":
            return genrm.parse_last(text, record.get("finish_reason"))
        verdict = genrm.parse_published(text, config.default_score, config.default_ranking)
        numbers = (verdict.score_1, verdict.score_2, verdict.ranking) if verdict is not None else ()
        return verdict if np.isfinite(np.array(numbers, np.float64)).all() else None

    async def _shared(self, key: str, question: tuple[Any, ...], tries: int) -> JsonObject:
        """One call for all identical requests in flight; ``tries``: those that were made for it before."""
        under_way = self._under_way.get(key)
        if under_way is None:
            under_way = asyncio.ensure_future(self._ask(key, question, tries))
            self._under_way[key] = under_way
            under_way.add_done_callback(lambda done: self._forget(key, done))
        # One caller's cancellation must not cancel the call for the others.
        return await asyncio.shield(under_way)

    def _forget(self, key: str, done: asyncio.Future[JsonObject]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # looked at, so that nothing is logged of it later

    async def _ask(self, key: str, question: tuple[Any, ...], tries: int) -> JsonObject:
        conversation, answer_1, answer_2, principle = question
        record: JsonObject = {}
        await self.start()
        # With the seeds of earlier tries a judge would give their answers again.
        for attempt in range(tries, tries + self.config.genrm_parse_retries + 1):
            if attempt > tries:
                await asyncio.sleep(self.config.genrm_parse_retry_sleep_s)
            async with self._room:
                self.tally.asked += 1
                self.tally.in_flight += 1
                try:
                    drawn = blake2b(f"{self.config.seed}:{key}:{attempt}".encode(), digest_size=8).digest()
                    seed = int.from_bytes(drawn) >> 33
                    answer = await self.judge.compare(conversation, answer_1, answer_2, principle, seed)
                finally:
                    self.tally.in_flight -= 1
            record = {"raw": tidy(answer.text), "usage": answer.usage, "tries": attempt + 1}
            record["finish_reason"] = answer.finish_reason
            if answer.refused:
                record["refused"] = answer.refused
                break
            if self._verdict(record) is not None:
                break
        self.verdicts.put({key: record})
        return record

    async def close(self) -> None:
        """Cancel the calls in flight, and end the judge if it was started."""
        for task in list(self._under_way.values()):
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            await self.judge.close()

    def rows(self, comparison: Comparison, judged: Sequence[Judged]) -> list[JsonObject]:
        """Rows of the comparisons table."""
        name = self.judge_name
        rows = []
        for result in judged:
            i, j, judge_idx = result.match
            first, second = comparison.candidates[i], comparison.candidates[j]
            verdict = result.verdict or Verdict(None, None, None)
            rows.append(
                {
                    "comparison_id": comparison_id(comparison, result.match),
                    "group_id": comparison.group_id,
                    "task_id": comparison.task_id,
                    "rollout_i": first.rollout_id,
                    "rollout_j": second.rollout_id,
                    "response_i": first.index,
                    "response_j": second.index,
                    "judge_idx": judge_idx,
                    "score_1": verdict.score_1,
                    "score_2": verdict.score_2,
                    "ranking": verdict.ranking,
                    "status": result.status,
                    "raw": result.raw if result.raw is not None else result.reason,
                    "principle": comparison.principle,
                    "judge": name,
                    "usage": json.dumps(result.usage) if result.usage else None,
                    "run_id": comparison.run_id,
                }
            )
        return rows


def comparison_id(comparison: Comparison, match: Match) -> str:
    """hash(run_id, group_id, i, j, judge_idx), i and j being the responses' indices."""
    i, j = comparison.candidates[match.response_i].index, comparison.candidates[match.response_j].index
    return digest(comparison.run_id, comparison.group_id, str(i), str(j), str(match.judge_idx))


def sizes_of(candidates: Sequence[Candidate]) -> Sizes:
    """Lengths and style densities of responses."""
    return Sizes(
        np.array([len(e.reasoning.strip()) for e in candidates], np.int64),
        np.array([len(e.answer.strip()) for e in candidates], np.int64),
        np.array([genrm.style_density(e.answer) for e in candidates], np.float64),
    )


def tidy(text: str) -> str:
    """Text that every engine and file takes: lone surrogates, which no encoding has, are replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)


def digest(*parts: str) -> str:
    """A hash of the parts with their lengths, so that moving text from one to another changes it."""
    hasher = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:%b" % (len(data), data))
    return hasher.hexdigest()
