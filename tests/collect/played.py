"""One schedule of ``collect``'s loop: an engine, environment and rewards whose every fault is drawn and kept in a book,
interruptions and further starts until nothing is pending, and what must hold of the rows and failures afterwards."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from gymdata.commands.collect.episode import EpisodeConfig
from gymdata.commands.collect.loop import Collector
from gymdata.commands.collect.outcome import Limits
from gymdata.commands.collect.resume import AttemptTracker, RunKey
from gymdata.engines.port import Generation, SampleRequest
from gymdata.environments.port import StepResult, Verdict
from gymdata.errors import OutsideError
from gymdata.progress import NullProgress
from gymdata.rewards.port import Value, View
from gymdata.rewards.scheduler import RewardScheduler, Weighted
from gymdata.rollouts.messages import Message, Task
from gymdata.store.columns import check_rollout
from gymdata.store.lines import encode
from gymdata.workers.signals import Stop
from tests.collect.fake_parts import END, LetterChat
from tests.collect.wire import Wire
from tests.seeded_loop import LATE_S, KilledError, SeededLoop, seeded

KEY = RunKey("run", "fake", "fake-0", 0)
REWARD_S = 6.0
#: Starts of a command after which it is no longer interrupted.
INTERRUPTED = 2


@dataclass
class MemoryRun:
    """What the lines of a run folder would say. ``checked``: each row as the store checks it, which takes longest of all."""

    checked: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    def append(self, row: dict[str, Any]) -> None:
        if self.checked:
            check_rollout(row)
        self.rows.append(orjson.loads(encode(row)))

    def fail(self, record: dict[str, Any]) -> None:
        self.failed.append(orjson.loads(encode(record)))

    def left(self) -> MemoryRun:
        """What a killed process leaves."""
        return MemoryRun(self.checked, list(self.rows), list(self.failed))


@dataclass(eq=False)
class Attempt:
    """What was done in one attempt, as those outside saw it. ``faults``: what its engine or environment had since the last
    answer."""

    task_id: str
    index: int
    began: float
    sampled: list[list[int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    values: dict[str, list[Value]] = field(default_factory=dict)
    verdict: float | None = None
    prompted: bool = False
    answered_at: float = 0.0
    closed: int = 0


class World:
    """Everything outside of the loop. ``rate``: the share of calls that fail; ``fatal``: of those, the ones after which
    engine or environment is gone."""

    def __init__(self, loop: SeededLoop) -> None:
        rng = self.rng = loop.rng
        self.loop = loop
        self.rate = rng.choice([0.0, 0.05, 0.3])
        self.fatal = 0.0
        self.pause_s = rng.choice([0.1, 1.0, 4.0])
        self.time_limit = rng.choice([None, None, 3.0, 8.0])
        self.turns = rng.randint(1, 3)
        self.prefers_groups = rng.random() < 0.7
        self.num_rollouts, self.concurrency = rng.randint(1, 4), rng.randint(1, 5)
        self.max_attempts = rng.randint(1, 3)
        rows = [{"task_id": f"t{n}", "prompt": f"q{n}"} for n in range(rng.randint(1, 3))]
        self.tasks = [Task(row["task_id"], [_user(row["prompt"])], None, row, row["prompt"]) for row in rows]
        self.rollouts = {KEY.rollout_id(t, k): (t.task_id, k) for t in self.tasks for k in range(self.num_rollouts)}
        #: The attempts of this start, by rollout; and how many environments run.
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.rewards = [Reward(f"r{n}", rng.random() < 0.3, self) for n in range(rng.randint(0, 2))]
        self.wire = Wire.drawn(self) if rng.random() < 0.4 else None
        self.running = self.n_faults = 0

    def fault(self, system: str, attempts: Sequence[Attempt] = ()) -> OutsideError:
        """One more fault, with a text that no other has; the book of the attempts has it."""
        self.n_faults += 1
        text = f"fault {self.n_faults}."
        for attempt in attempts:
            attempt.faults.append(text)
        fatal = self.loop.chance(self.fatal)
        return OutsideError(system, text, fatal=fatal, final=not fatal and self.loop.chance(0.1))

    async def outside(self, system: str, *attempts: Attempt) -> None:
        """A call of a system: it takes its time, and may fail, or for a rollout with a time limit never end."""
        await self.loop.pause(self.pause_s)
        if self.loop.chance(self.rate):
            if self.time_limit is not None and self.loop.chance(0.3):
                await asyncio.Event().wait()
            raise self.fault(system, attempts)

    # --- the environment ---------------------------------------------------------------------------------------------

    identity: Mapping[str, Any] = {}

    async def start(self, task: Task, rollout_index: int) -> Episode:
        place = task.task_id, rollout_index
        assert place not in self.attempts, f"{place} is played twice in one start"
        attempt = self.attempts[place] = Attempt(*place, began=self.loop.time())
        self.running += 1
        assert self.running <= self.concurrency, "more rollouts at a time than --concurrency"
        try:
            await self.outside("environment", attempt)
        except BaseException:
            self.running -= 1
            raise
        attempt.prompted = True
        return Episode(self, attempt, task)

    async def close(self) -> None:
        self.running = 0

    # --- the engine --------------------------------------------------------------------------------------------------

    default_concurrency = 8

    def members(self, request_id: str, n: int) -> list[Attempt]:
        task_id, first = self.rollouts[request_id.rpartition("-")[0]]
        return [self.attempts[task_id, first + k] for k in range(n)]

    async def sample(self, request: SampleRequest) -> list[Generation]:
        members = self.members(request.request_id, request.n)
        await self.outside("engine", *members)
        sent = request.request_id, request.prompt_token_ids, request.max_tokens
        return [self.one(*sent, attempt) for attempt in members]

    def one(self, request_id: str, prompt: Sequence[int], max_tokens: int, attempt: Attempt) -> Generation:
        """A generation that arrives now."""
        attempt.faults.clear()
        assert int(request_id.rpartition("-")[2]) == len(attempt.sampled), "a turn is sampled twice"
        ids = [*(self.rng.randrange(97, 123) for _ in range(self.rng.randint(0, 6))), END][:max_tokens]
        end = "stop" if ids[-1] == END else "length"
        if self.loop.chance(self.rate / 4):
            end, attempt.faults = "abort", ["finish_reason 'abort'"]
        attempt.sampled.append(ids)
        attempt.answered_at = self.loop.time()
        return Generation(prompt, ids, [-self.rng.random() for _ in ids], end)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


class Episode:
    """An environment that answers so many times; its verdict names the attempt to the rewards."""

    tools = None

    def __init__(self, world: World, attempt: Attempt, task: Task) -> None:
        self.world, self.attempt = world, attempt
        self.messages = list(task.messages)

    async def step(self, message: Message) -> StepResult:
        await self.world.outside("environment", self.attempt)
        done = self.world.loop.chance(0.4)
        return StepResult([] if done else [_user("go on")], done=done)

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict:
        world = self.world
        await world.loop.pause(world.pause_s)
        if world.loop.chance(world.rate):
            raise world.fault("environment", [self.attempt])
        self.attempt.verdict = world.rng.choice([None, 0.0, 1.0])
        return Verdict(self.attempt.verdict, {"stdout": f"{self.attempt.task_id} {self.attempt.index}"})

    async def close(self) -> None:
        self.attempt.closed += 1
        self.world.running -= 1
        await self.world.loop.pause(1.0)
        if self.world.loop.chance(self.world.rate):
            raise self.world.fault("environment")


@dataclass
class Reward:
    """A reward function that keeps what it gave to whom."""

    name: str
    quick: bool
    world: World
    source = "played"
    bounded = False
    needs = None

    def __call__(self, rollouts: Sequence[View]) -> list[Value]:
        return [self._one(view) for view in rollouts]

    def _one(self, view: View) -> Value:
        world = self.world
        task_id, _, index = str(view["stdout"]).partition(" ")
        value: Value = world.rng.choice([None, 0.5, 2.0])
        if world.loop.chance(world.rate):
            value = world.fault("reward")
        world.attempts[task_id, int(index)].values.setdefault(self.name, []).append(value)
        return value


# --- a command ------------------------------------------------------------------------------------------------------


@dataclass
class Start:
    """One start of the command, and how it was ended: ``stopped`` by the first Ctrl-C, ``dropped`` by the second,
    ``killed``, or because engine or environment was ``gone``."""

    run: MemoryRun
    collector: Collector
    concurrency: int
    stopped: bool = False
    dropped: bool = False
    killed: bool = False
    gone: bool = False


def tracker_of(world: World, run: MemoryRun) -> AttemptTracker:
    columns = {"rollout_id": pa.string(), "task_id": pa.string(), "rollout_index": pa.int64()}
    existing = pa.table({name: pa.array([row[name] for row in run.rows], kind) for name, kind in columns.items()})
    return AttemptTracker(
        KEY, num_rollouts=world.num_rollouts, max_attempts=world.max_attempts, existing=existing, failures=run.failed
    )


def started(world: World, run: MemoryRun) -> Start | None:
    """None when nothing is pending."""
    tracker = tracker_of(world, run)
    pending = tracker.resume_state(world.tasks, Path("run")).pending
    if not pending:
        return None
    world.attempts = {}
    sampler = world if world.wire is None else world.loop.play(world.wire.started())
    setting = EpisodeConfig(
        sampler, LetterChat(), world, KEY, Limits(5, world.turns, time_limit=world.time_limit), 7, 1.0
    )  # fmt: skip
    scheduler = RewardScheduler([Weighted(r, 1.0 + n) for n, r in enumerate(world.rewards)], timeout_s=REWARD_S)
    collector = Collector(run, setting, scheduler, tracker, pending, NullProgress(), len(run.rows))  # type: ignore[arg-type]
    return Start(run, collector, world.concurrency)


async def command(world: World, start: Start, stop_at: float | None, drop_at: float | None) -> None:
    """What ``collect`` does with its engine up."""
    stop, loop = Stop(), world.loop
    timers = []

    def drop() -> None:
        if stop.work is not None and stop.work.cancel():
            start.dropped = True

    def first() -> None:
        stop.set()
        start.stopped = True
        if drop_at is not None:
            timers.append(loop.call_later(drop_at, drop))

    if stop_at is not None:
        timers.append(loop.call_later(stop_at, first))
    try:
        await stop.finish(start.collector.collect(world.tasks, concurrency=start.concurrency, stop=stop))
    except OutsideError as error:
        assert error.fatal
        start.gone = True
    finally:
        for timer in timers:
            timer.cancel()
        await world.close()
        await start.collector.setting.sampler.close()


def play(seed: int) -> Counter[str]:
    """Schedule ``seed``; counts what happened in it."""
    seen: Counter[str] = Counter()
    with seeded(seed) as loop:
        world, run = World(loop), MemoryRun(checked=seed % 20 == 0)
        for number in range(100):
            world.fatal = loop.rng.choice([0.0, 0.2]) if number < INTERRUPTED else 0.0
            start = started(world, run)
            if start is None:
                break
            run = one_start(world, start, interrupted=number < INTERRUPTED)
            seen["served"] += world.wire is not None
            seen["starts"] += 1
            seen.update(name for name in ("stopped", "dropped", "killed", "gone") if getattr(start, name))
        check_end(world, run)
    seen["faults"] = world.n_faults
    seen["rows"] = len(run.rows)
    return seen


def one_start(world: World, start: Start, *, interrupted: bool) -> MemoryRun:
    """Play it, check it, and return what it left."""
    loop, run, before = world.loop, start.run, start.run.left()
    how = loop.rng.choice(["", "", "stop", "drop", "kill"]) if interrupted else ""
    stop_at = loop.rng.expovariate(0.2) if how in ("stop", "drop") else None
    drop_at = loop.rng.expovariate(0.5) if how == "drop" else None
    loop.kill_at = loop.steps + loop.rng.randint(1, 400) if how == "kill" else None
    try:
        loop.play(command(world, start, stop_at, drop_at))
        loop.kill_at = None
    except KilledError:
        start.killed, run = True, run.left()
    if start.killed or start.dropped:
        took = loop.drop()
        assert start.killed or not took, f"what was dropped took {took} s"
    else:
        loop.settle()
        assert loop.waiting() == [], f"tasks are left: {loop.waiting()}"
    world.running = 0
    if world.wire is not None:
        if start.killed:  # also before its first step, when nothing was there to close what it had opened
            world.wire.sessions = 0
        world.wire.check()
    check_start(world, start, before, run)
    return run


# --- what must hold ---------------------------------------------------------------------------------------------------


def check_start(world: World, start: Start, before: MemoryRun, run: MemoryRun) -> None:
    """Every attempt of this start is one row or one failure with its own reason, or was dropped."""
    rows = {row["rollout_id"]: row for row in run.rows}
    assert len(rows) == len(run.rows), "a rollout is there twice"
    assert run.rows[: len(before.rows)] == before.rows
    assert run.failed[: len(before.failed)] == before.failed
    new_rows = {i: row for i, row in rows.items() if i not in {row["rollout_id"] for row in before.rows}}
    records = run.failed[len(before.failed) :]
    new_failures = {record["rollout_id"]: record for record in records if record["kind"] != "reward"}
    assert len(new_failures) == sum(record["kind"] != "reward" for record in records), "an attempt failed twice"
    assert not new_rows.keys() & new_failures.keys(), "an attempt is a row and a failure"
    for rollout_id, place in world.rollouts.items():
        attempt = world.attempts.get(place)
        ended = new_rows.get(rollout_id) or new_failures.get(rollout_id)
        if attempt is None:
            assert ended is None, f"{place} ended and was not begun"
        elif ended is None:
            assert start.dropped or start.killed, f"{place} was begun and is neither a row nor a failure"
        elif "kind" in ended:
            check_failure(world, attempt, ended, run.failed)
        else:
            check_row(world, attempt, ended, records, killed=start.killed)
    if not (start.killed or start.dropped):
        counted_failures = sum(record["counts"] for record in new_failures.values())
        assert (start.collector.done, start.collector.failed) == (len(new_rows), counted_failures)
        if not (start.stopped or start.gone):
            assert len(new_rows) + len(new_failures) == start.collector.pending, "a pending rollout was not begun"


def check_failure(world: World, attempt: Attempt, record: dict[str, Any], failures: list[dict[str, Any]]) -> None:
    """It has its own reason, everything that was sampled, and the next number; nothing of it was scored."""
    sampled = [turn["generation_token_ids"] for turn in record["turns"]]
    timed = [[]] if world.time_limit is not None and record["place"] == "verdict" else []
    assert sampled == (attempt.sampled or timed), "a failure lacks what was sampled"
    assert attempt.values == {}, "a failed attempt was scored"
    if "s limit" in record["message"] or "gave no prompt" in record["message"]:
        # Before there was a prompt, or while no server could be reached.
        assert record["duration_s"] >= world.time_limit - 1e-6
        assert not attempt.prompted or (world.wire is not None and "unreachable when" in record["message"])
    else:
        # Of several servers the one that was tried last may be gone, which is not what the request failed for.
        given = attempt.faults if world.wire is not None else attempt.faults[-1:]
        assert any(text in record["message"] for text in given), f"failed for {record['message']!r}, not for {given}"
    assert attempt.closed == attempt.prompted, "an episode is not closed once"
    counted = [f for f in failures if f["rollout_id"] == record["rollout_id"] and f["counts"]]
    numbers = [f["attempt"] for f in counted]
    expected = [world.max_attempts if f["final"] else n + 1 for n, f in enumerate(counted)]
    assert numbers == expected, f"attempts are numbered {numbers}, expected {expected}"


def check_row(
    world: World, attempt: Attempt, row: dict[str, Any], records: list[dict[str, Any]], *, killed: bool
) -> None:
    """Its tokens are those that were sampled, it ended for a reason that happened, and has the reward that it was given."""
    assert attempt.closed == 1, "an episode is not closed once"
    sampled = [turn["generation_token_ids"] for turn in row["turns"]]
    timed = row["stop_reason"] == "time_limit"
    # Time may be over while a request waits to be tried again.
    assert not attempt.faults or (timed and world.wire is not None), f"a row of what failed: {attempt.faults}"
    assert sampled == (attempt.sampled or ([[]] if timed else [])), "a row has other tokens than were sampled"
    if timed:
        assert row["duration_s"] >= world.time_limit - 1e-6
        assert row["status"] == "truncated"
    elif world.time_limit is not None:
        assert attempt.answered_at - attempt.began <= world.time_limit + LATE_S, (
            "an answer was taken after the time limit"
        )
    faults = json.loads(row["extra"]).get("reward_faults", {})
    expected = 0.0 if attempt.verdict is None else attempt.verdict
    named = attempt.verdict is not None
    for n, reward in enumerate(world.rewards):
        values = attempt.values.get(reward.name, [])
        assert len(values) <= 1, f"{reward.name} scored one attempt {len(values)} times"
        if reward.name in faults:
            given = [value for value in values if isinstance(value, OutsideError)]
            late = f"reward: no answer within {REWARD_S:g} s"
            assert faults[reward.name] in {late, *(value.message for value in given)}
            named_so = [(r["message"], r["place"]) for r in records if r["rollout_id"] == row["rollout_id"]]
            assert killed or (faults[reward.name], f"reward {reward.name}") in named_so, (
                "a reward's fault is not recorded"
            )
        else:
            (value,) = values
            assert not isinstance(value, OutsideError)
            expected += (1.0 + n) * (value or 0.0)
            named |= value is not None
    assert row["reward"] == (expected if named and not faults else None), "another reward than was given"


def check_end(world: World, run: MemoryRun) -> None:
    """With nothing pending every rollout is there, or has failed as often as it may."""
    rows, failures = {row["rollout_id"] for row in run.rows}, run.failed
    for rollout_id, place in world.rollouts.items():
        counted = [f for f in failures if f["rollout_id"] == rollout_id and f["counts"]]
        spent = bool(counted) and counted[-1]["attempt"] >= world.max_attempts
        assert (rollout_id in rows) != spent, f"{place} is {'there and' if spent else 'neither there nor'} given up"
        assert len(counted) <= world.max_attempts
