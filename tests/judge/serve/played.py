"""One schedule of the compare server: trainers whose members come late, twice, never or too many, go away and ask again, a
judge that fails as is drawn, stops and kills with a restart on what was saved, and what must hold of every answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gymdata.commands.judge.pairwise import Comparison, PairwiseJudge
from gymdata.commands.judge.port import JudgeAnswer
from gymdata.commands.judge.serve.app import CompareRequest, Service, VerifyRequest
from gymdata.commands.judge.serve.group_judge import GroupJudge, Outcome
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache, VerdictLog
from gymdata.errors import OutsideError
from gymdata.rollouts.messages import Message
from gymdata.workers.serving import Refused
from tests.judge.serve.conftest import QUESTION, response, verify_body
from tests.judge_server import quality, verdict
from tests.seeded_loop import LATE_S, KilledError, SeededLoop, seeded

GRACE_S = 1.0


@dataclass(eq=False)
class Asked:
    """One member of a trainer, and the answers to its requests so far. ``identity``: of its ids, where it has all."""

    text: str
    body: dict[str, Any]
    identity: tuple[str, str] | None
    rewards: list[float] = field(default_factory=list)


class World:
    """The trainers' members, the judge, and what both saw."""

    identity: Mapping[str, Any] = {"model": "drawn"}
    default_concurrency = 4

    def __init__(self, loop: SeededLoop) -> None:
        rng = self.rng = loop.rng
        self.loop = loop
        self.rate, self.pause_s = rng.choice([0.0, 0.1, 0.4]), rng.choice([0.1, 1.0, 4.0])
        self.size, self.timeout_s = rng.randint(2, 4), rng.choice([4.0, 40.0])
        self.config = ServeConfig(
            genrm="m",
            num_rollouts_per_prompt=self.size,
            cohort_timeout=self.timeout_s,
            genrm_parse_retries=rng.randint(0, 2),
            comparison_strategy=rng.choice(["circular", "all_pairs", "both_orders"]),
            concurrency=rng.randint(1, 4),
            on_judge_failure=rng.choice(["error", "default-score"]),
        )
        #: The groups whose members have ids, and may be sent again.
        self.with_ids: set[str] = set()
        self.members = [m for group in range(rng.randint(1, 2)) for m in self.group(group)]
        self.verdicts, self.answers = VerdictCache(None), VerdictCache(None)
        self.log = VerdictLog(None, "comparison_id")
        self.seen: Counter[str] = Counter()
        #: Verdicts that were given, and calls in flight, by what was compared.
        self.given: set[tuple[str, ...]] = set()
        self.in_flight: set[tuple[str, ...]] = set()
        self.judged: list[Comparison] = []
        #: What does not hold where the server would take an error for the judge's.
        self.broken: list[str] = []

    def group(self, group: int) -> list[Asked]:
        """As many members as a cohort has, one more, or one less."""
        with_ids = self.rng.choice(["all", "all", "index", "none"])
        if with_ids == "all":
            self.with_ids.add(str(group))
        members = []
        for k in range(self.size + self.rng.choice([0, 0, 1, -1])):
            text = f"q={self.rng.randint(1, 5)} of {group}.{k}"
            ids: dict[str, Any] = {}
            if with_ids == "all":
                ids = {"group_id": f"g{group}", "rollout_id": k}
            elif with_ids == "index":
                ids = {"_ng_task_index": group, "_ng_rollout_index": k}
            identity = (f"g{group}", str(k)) if with_ids == "all" else None
            members.append(Asked(text, verify_body(text, f"prompt {group}", **ids), identity))
        return members

    # --- the judge ---------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        await self.loop.pause(self.pause_s)
        return {}

    async def close(self) -> None: ...

    async def compare(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None, seed: int | None
    ) -> JudgeAnswer:
        compared = (str(conversation), response_1, response_2)
        groups = {text.partition(" of ")[2].partition(".")[0] for text in (response_1, response_2)}
        # Without ids a repetition is another member, and is compared once more.
        once = groups <= self.with_ids
        if len(groups) > 1:
            self.broken.append(f"responses to different prompts are compared: {compared}")
        if once and compared in self.given:
            self.broken.append(f"a verdict is paid for twice: {compared}")
        if once and compared in self.in_flight:
            self.broken.append(f"the same call twice at a time: {compared}")
        self.in_flight.add(compared)
        try:
            await self.loop.pause(self.pause_s)
        finally:
            self.in_flight.discard(compared)
        if self.loop.chance(self.rate):
            self.seen["judge faults"] += 1
            kind = self.rng.choice(["error", "gone", "garbled", "refused"])
            if kind in ("error", "gone"):
                raise OutsideError("judge", "busy", retryable=True, fatal=kind == "gone")
            return JudgeAnswer("no numbers", refused="too rude" if kind == "refused" else None)
        self.given.add(compared)
        return JudgeAnswer(verdict(response_1, response_2), finish_reason="stop")

    # --- a life of the server ----------------------------------------------------------------------------------------

    def service(self) -> tuple[Service, PairwiseJudge]:
        world = self

        class Watched(GroupJudge):
            async def judge(self, comparison: Comparison) -> Outcome:
                world.began(comparison)
                return await super().judge(comparison)

        pairwise = PairwiseJudge(self.config, self, self.verdicts, retry_unparsed=True, stop_when_gone=False)
        return Service(self.config, Watched(self.config, pairwise, self.log), self.answers, "run"), pairwise

    def began(self, comparison: Comparison) -> None:
        """A cohort has so many members, each once; with ids it has none that was paid, unless another asks again."""
        if comparison.conversation == QUESTION:
            return
        names = [candidate.rollout_id for candidate in comparison.candidates]
        if not len(set(names)) == len(names) == self.size:
            self.broken.append(f"a cohort of {names}, expected {self.size}")
        paid = {m.identity for m in self.members if m.rewards}
        if comparison.group_id not in {before.group_id for before in self.judged}:
            twice = {(comparison.group_id.partition("+")[0], name) for name in names} & paid
            if twice:
                self.broken.append(f"{twice} are judged again after they had their rewards")
        self.judged.append(comparison)

    async def ask(self, service: Service, member: Asked) -> int:
        """The status of one request."""
        self.seen["requests"] += 1
        sent_at = self.loop.time()

        async def sent() -> dict[str, Any]:
            return member.body

        try:
            answer = await service.verify(VerifyRequest(**member.body), SimpleNamespace(json=sent))  # type: ignore[arg-type]
        except Refused as refused:
            kind = refused.body["kind"]
            assert refused.status == 503, f"{refused.status}: {refused.body}"
            assert kind in ("cohort_incomplete", "judge_failed", "stopping")
            if kind == "cohort_incomplete":
                assert self.loop.time() - sent_at <= self.timeout_s + LATE_S, "the deadline came late"
                assert not refused.body["detail"].startswith(f"{self.size} of"), "a full cohort was called incomplete"
            if kind == "judge_failed":
                assert self.config.on_judge_failure == "error"
                assert self.rate > 0
            self.seen[kind] += 1
            return 503
        said = json.loads(bytes(answer.body))
        assert {**said, "reward": 0, "judge_failed": 0, "judge_failure": 0}.items() >= member.body.items()
        if said["judge_failed"]:
            assert (said["reward"], self.rate > 0) == (self.config.default_score, True)
            return 503
        assert said["reward"] == quality(member.text), f"{member.text} got {said['reward']}"
        member.rewards.append(said["reward"])
        return 200

    async def trainer(self, service: Service, member: Asked) -> None:
        """Sends a member, late or soon, goes away and sends it again, or asks again after an error."""
        for _ in range(4):
            await asyncio.sleep(self.rng.expovariate(1 / self.rng.choice([0.1, 1.0, self.timeout_s])))
            request = asyncio.create_task(self.ask(service, member))
            if self.loop.chance(0.15):
                await self.loop.pause(self.pause_s)
                gone = request.cancel()
                await asyncio.gather(request, return_exceptions=True)
                if gone:
                    continue
            if await request == 200 and self.loop.chance(0.8):
                return

    async def compares(self, service: Service) -> None:
        """All responses at once."""
        texts = [f"q={self.rng.randint(1, 5)} of c.{k}" for k in range(self.rng.randint(1, 3))]
        objects: Any = [response(text) for text in texts]
        try:
            answer = await service.compare(CompareRequest(conversation_history=QUESTION, response_objs=objects))
        except Refused as refused:
            assert (refused.status, refused.body["kind"]) == (503, "stopping")
            return
        said = json.loads(bytes(answer.body))
        named = said.get("judge_failed_responses", [int(n) for n in said.get("reasons", {})])
        default = self.config.default_score
        for k, (text, reward) in enumerate(zip(texts, said["rewards"], strict=True)):
            if len(texts) == 1:
                assert reward == default
            elif k in named:
                assert reward == (default if self.config.on_judge_failure == "default-score" else None)
            else:
                assert reward == quality(text)
        assert not named or self.rate > 0

    async def life(self, *, stop_at: float | None) -> None:
        """From the start to the end of a server."""
        service, pairwise = self.service()
        await pairwise.start()
        sent = [member for member in self.members if not self.loop.chance(0.1)]
        sent += [member for member in sent if self.loop.chance(0.2)]
        work = [asyncio.create_task(self.trainer(service, member)) for member in sent]
        if self.loop.chance(0.3):
            work.append(asyncio.create_task(self.compares(service)))
        done = asyncio.gather(*work)
        if stop_at is not None:
            await asyncio.wait([done], timeout=stop_at)
            began = self.loop.time()
            await service.stop()
            assert self.loop.time() - began <= GRACE_S + LATE_S, "the server takes longer to stop than it may"
            self.seen["stops"] += 1
        await done
        # Who went away has a place until the deadline.
        await asyncio.sleep(self.timeout_s + 200 * self.pause_s)
        health = await service.health()
        left = {name: n for name, n in health.items() if isinstance(n, int) and n}
        assert left == {}, f"nobody comes any more, and there are {left}"
        await pairwise.close()


def play(seed: int) -> Counter[str]:
    """Schedule ``seed``; counts what happened in it."""
    with seeded(seed) as loop:
        world = World(loop)
        for _ in range(loop.rng.choice([1, 1, 2, 3])):
            how = loop.rng.choice(["", "", "stop", "kill"])
            loop.kill_at = loop.steps + loop.rng.randint(1, 500) if how == "kill" else None
            try:
                loop.play(world.life(stop_at=loop.rng.expovariate(0.2) if how == "stop" else None))
                loop.kill_at = None
                loop.settle()
                assert loop.waiting() == [], f"tasks are left: {loop.waiting()}"
            except KilledError:
                world.seen["kills"] += 1
                kept = [list(member.rewards) for member in world.members]
                loop.drop()
                for member, rewards in zip(world.members, kept, strict=True):
                    member.rewards = rewards
            assert world.broken == [], world.broken
        by_identity = defaultdict(set)
        for member in world.members:
            by_identity[member.identity or member.text].update(member.rewards)
        assert all(len(rewards) <= 1 for rewards in by_identity.values()), "one member was given two rewards"
        world.seen["rewards"] = sum(len(member.rewards) for member in world.members)
    return world.seen
