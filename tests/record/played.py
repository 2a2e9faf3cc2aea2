"""One schedule of ``record``: agents that ask, go away, ask again, in parallel and in streams, finish once, twice or never,
an engine that fails as is drawn, stops and kills with a restart on the journal, and what must hold of rows and answers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.dialects.chat import ChatCompletions
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.request import AgentRequest
from gymdata.commands.record.server import Service
from gymdata.commands.record.settings import RecordConfig
from gymdata.engines.port import Generation, SampleRequest
from gymdata.errors import OutsideError
from gymdata.rewards.port import Value, View
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.workers.signals import together
from tests.collect.fake_parts import END, FakeSampler
from tests.collect.played import MemoryRun
from tests.record.scripted_engine import Letters
from tests.record.streaming import receiving
from tests.seeded_loop import LATE_S, KilledError, SeededLoop, seeded

IDLE_S, TICK_S, REWARD_S = 40.0, 1.0, 6.0
CHAT = ChatCompletions()
Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class SessionRun(MemoryRun):
    """A run whose sessions are journaled in ``folder``."""

    folder: Path = Path()
    run_id = "run"

    def existing(self, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([ROLLOUTS.schema.field(name) for name in columns])
        return pa.Table.from_pylist([{name: row[name] for name in columns} for row in self.rows], schema)

    def failures(self) -> list[dict[str, Any]]:
        return self.failed

    def sync(self) -> None: ...

    def sampled_with(self, **_: Any) -> None: ...

    def restarted(self, folder: Path) -> SessionRun:
        """What a killed process leaves."""
        shutil.copytree(self.folder, folder)
        return SessionRun(self.checked, list(self.rows), list(self.failed), folder)

    def recorded(self, _: Path, rollout_id: str, columns: Sequence[str]) -> dict[str, Any]:
        (row,) = (row for row in self.rows if row["rollout_id"] == rollout_id)
        return {name: row[name] for name in ("rollout_id", *columns)}


@dataclass(eq=False)
class Agent:
    """One conversation in a session, as far as it has come. ``finishes``: how often it says that the session has ended."""

    key: str
    messages: list[dict[str, str]]
    turns: int
    finishes: int
    ending: dict[str, Any]
    tries: int = 12


class World:
    """The engine, the agents, and what both saw."""

    prefers_groups = True
    default_concurrency = 8

    def __init__(self, loop: SeededLoop) -> None:
        rng = self.rng = loop.rng
        self.loop = loop
        self.rate, self.pause_s = rng.choice([0.0, 0.1, 0.4]), rng.choice([0.1, 1.0])
        self.fatal = 0.0
        self.max_turns = rng.choice([None, None, 3])
        self.rewards = [Reward(self)] if rng.random() < 0.3 else []
        self.agents = [self.agent(f"k{n}") for n in range(rng.randint(1, 2)) for _ in range(rng.choice([1, 1, 2]))]
        self.seen: Counter[str] = Counter()
        #: By session: what was sampled, and what an agent read of it; and the texts of faults.
        self.sampled: dict[str, list[list[int]]] = defaultdict(list)
        self.read: dict[str, list[str]] = defaultdict(list)
        self.faults: list[str] = []
        self.n_sampled = 0

    def agent(self, key: str) -> Agent:
        rng = self.rng
        ending = {
            "status": rng.choice(["completed", "completed", "truncated", "failed"]),
            "reward": rng.choice([0.0, 1.0]),
        }
        finishes = rng.choice([0, 1, 1, 2])
        return Agent(key, [{"role": "user", "content": f"q{rng.randint(0, 2)}"}], rng.randint(1, 3), finishes, ending)

    # --- the engine --------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        return {"engine": "played"}

    async def close(self) -> None: ...

    async def sample(self, request: SampleRequest) -> list[Generation]:
        await self.loop.pause(self.pause_s)
        if self.loop.chance(self.rate):
            self.faults.append(f"fault {len(self.faults)}.")
            status = self.rng.choice([None, 400, 429, 503])
            raise OutsideError("engine", self.faults[-1], status=status, fatal=self.loop.chance(self.fatal))
        self.n_sampled += 1
        ids = [*f"a{self.n_sampled}".encode(), END]
        self.sampled[request.group].append(ids)
        return [Generation(list(request.prompt_token_ids), ids, [-0.5] * len(ids), "stop")]

    # --- a request ---------------------------------------------------------------------------------------------------

    async def post(self, handle: Handler, key: str, body: Any, leaves: float | None) -> tuple[int | None, str]:
        """Status and text of the answer, of which there is one; no status for a client that was gone before it."""
        self.seen["requests"] += 1
        content, gone, messages = json.dumps(body).encode(), asyncio.Event(), list[dict[str, Any]]()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
        scope |= {"asgi": {"spec_version": "2.3"}, "path_params": {"key": key}}

        receive = receiving(content, gone)

        async def send(message: dict[str, Any]) -> None:
            if not gone.is_set():
                messages.append(message)

        timer = None if leaves is None else self.loop.call_later(leaves, gone.set)
        response = await handle(Request(scope, receive))
        await response(scope, receive, send)  # type: ignore[arg-type]
        if timer is not None:
            timer.cancel()
        starts = [message["status"] for message in messages if message["type"] == "http.response.start"]
        whole = len(messages) > 1 and not messages[-1].get("more_body", False)
        if gone.is_set() and not whole:
            self.seen["left"] += 1
            return None, ""
        assert (len(starts), whole) == (1, True), f"answered {len(starts)} times, whole: {whole}"
        return starts[0], b"".join(message.get("body", b"") for message in messages).decode()

    async def ask(self, service: Service, agent: Agent) -> bool:
        """One turn; whether the agent goes on."""
        body = {"model": "m", "messages": agent.messages, "stream": self.loop.chance(0.3)}
        leaves = self.rng.expovariate(1.0) if self.loop.chance(0.15) else None
        handle = partial(service.complete, dialect=CHAT, count=False)
        status, text = await self.post(handle, agent.key, body, leaves)
        agent.tries -= 1
        if status == 200 and "error" not in text:
            (said,) = set(re.findall(r'"(a\d+)"', text))
            self.read[agent.key].append(said)
            agent.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
            agent.turns -= 1
        elif status == 409:
            assert self.row_of(agent.key) is not None or agent.key in self.ending, "a session that is open was refused"
            return False
        elif status is not None and "model calls, at most" in text:
            assert self.max_turns is not None
            return False
        elif status is not None:
            assert "fault" in text or "stopping" in text, f"{status}: {text}"
        return agent.turns > 0 and agent.tries > 0

    async def finish(self, service: Service, agent: Agent) -> None:
        """Once more each time; every answer says what the session's row says."""
        while agent.finishes:
            self.ending[agent.key] += 1
            status, text = await self.post(service.finish, agent.key, agent.ending, None)
            self.ending[agent.key] -= 1
            if status == 503:  # stopping
                return
            agent.finishes -= 1
            row = self.row_of(agent.key)
            if status == 404:
                assert row is None, "a session that has a row is not known"
                continue
            assert status == 200, f"{status}: {text}"
            said = json.loads(text)
            if said["status"] == "failed":
                assert row is None or agent.ending["status"] == "failed"
            else:
                assert row is not None, "a session ended without a row"
                names = ("rollout_id", "status", "stop_reason", "reward")
                assert [said[name] for name in names] == [row[name] for name in names]

    def row_of(self, key: str) -> dict[str, Any] | None:
        rows = [row for row in self.run.rows if json.loads(row["extra"])["session"] == key]
        assert len(rows) <= 1, f"session {key} has {len(rows)} rows"
        return rows[0] if rows else None

    # --- a life of the recorder --------------------------------------------------------------------------------------

    async def works(self, service: Service, agent: Agent) -> None:
        while agent.turns > 0 and agent.tries > 0 and not self.stopping:
            await self.loop.pause(self.pause_s)
            if not await self.ask(service, agent):
                agent.turns = 0 if not self.stopping else agent.turns
                break
        if not self.stopping:
            await self.finish(service, agent)

    async def life(self, run: SessionRun, *, stop_at: float | None) -> None:
        """From the start to the end of a recorder; without ``stop_at`` until every session has ended."""
        self.run, self.stopping, self.ending = run, False, Counter[str]()
        died = asyncio.Event()
        config = RecordConfig.of(
            {"output": run.folder, "idle_timeout": IDLE_S, "max_turns": self.max_turns, "reward_timeout": REWARD_S},
            "test",
        )
        parts = Parts(self, Letters(), None, [Weighted(r) for r in self.rewards], {"policy": "p", "policy_hash": "0"})  # type: ignore[arg-type]
        recorder = Recorder(config, parts, run, 7, died=lambda _: died.set())  # type: ignore[arg-type]
        await recorder.start()
        service = Service(config, recorder)

        async def tick() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                await recorder.end_idle()

        ticking = asyncio.create_task(tick())
        waiting = asyncio.create_task(died.wait())
        done = asyncio.create_task(together(self.works(service, agent) for agent in self.agents))
        await asyncio.wait([done, waiting], timeout=stop_at, return_when=asyncio.FIRST_COMPLETED)
        if done.done() and not died.is_set():
            await asyncio.sleep(IDLE_S + REWARD_S + TICK_S + 4 * LATE_S)
            assert recorder.sessions == {}, f"sessions are open: {list(recorder.sessions)}"
        self.stopping = True
        await service.stop()
        await done
        for task in (ticking, waiting):
            task.cancel()
        await asyncio.gather(ticking, waiting, return_exceptions=True)
        recorder.log.close()

    def check(self, run: SessionRun) -> None:
        """With every session ended, each turn that was sampled is in its row, or in the failure that an agent reported."""
        for key in {agent.key for agent in self.agents}:
            row = self.row_of(key)
            reported = [f for f in run.failed if f["task_id"] == key and f["kind"] == "environment"]
            kept = [t["generation_token_ids"] for part in (*reported, *([row] if row else [])) for t in part["turns"]]
            assert kept == self.sampled[key], f"session {key} has {kept}, sampled was {self.sampled[key]}"
            said = [bytes(ids[:-1]).decode() for ids in kept]
            assert set(self.read[key]) <= set(said), "an answer that was read is not recorded"
            assert self.max_turns is None or all(len(part["turns"]) <= self.max_turns for part in reported)
            if row is not None:
                self.check_row(key, row)
        told = [f["message"].rpartition("engine: ")[2] for f in run.failed if f["kind"] == "engine"]
        assert sorted(told) == sorted(self.faults), "a fault of the engine is not recorded once"

    def check_row(self, key: str, row: dict[str, Any]) -> None:
        assert self.max_turns is None or row["n_turns"] <= self.max_turns
        parts = {part["name"]: part["value"] for part in row["rewards"]}
        offered = {a.ending["reward"] for a in self.agents if a.key == key}
        assert parts.get("reported") in {None, *offered}
        faults = json.loads(row["extra"]).get("reward_faults")
        scored = [value for value in parts.values() if value is not None]
        assert row["reward"] == (sum(scored) if scored and not faults else None)
        assert row["stop_reason"] != "idle_timeout" or "reported" not in parts
        self.seen[str(row["stop_reason"])] += 1


@dataclass
class Reward:
    """A reward that is slow and fails."""

    world: World
    name = "played"
    source = "played"
    quick = False
    bounded = False
    needs = None

    def __call__(self, rollouts: Sequence[View]) -> list[Value]:
        loop = self.world.loop
        return [OutsideError("reward", "bang") if loop.chance(self.world.rate) else 0.5 for _ in rollouts]


def recorder_of(folder: Path) -> Recorder:
    """A recorder that writes to memory, with an engine that answers."""
    config = RecordConfig.of({"output": folder}, "test")
    engine = FakeSampler()
    return Recorder(
        config,
        Parts(engine, Letters(), None, [], {"policy": "p", "policy_hash": "0"}),
        SessionRun(True, folder=folder),
        7,
    )  # type: ignore[arg-type]


def asked_of(text: str) -> AgentRequest:
    return AgentRequest("m", [{"role": "user", "content": text}])


def play(folder: Path, seed: int) -> Counter[str]:
    """Schedule ``seed``; counts what happened in it."""
    lives = folder / str(seed)
    lives.mkdir()
    with seeded(seed) as loop:
        world, run = World(loop), SessionRun(seed % 20 == 0, folder=lives / "0")
        run.folder.mkdir()
        n_lives = loop.rng.choice([1, 1, 2, 3])
        for number in range(1, n_lives + 1):
            last = number == n_lives
            how = "" if last else loop.rng.choice(["stop", "kill", "fatal"])
            world.fatal = 0.5 if how == "fatal" else 0.0
            loop.kill_at = loop.steps + loop.rng.randint(1, 600) if how == "kill" else None
            stop_at = loop.rng.expovariate(0.3) if how == "stop" else None
            with mock.patch("gymdata.commands.record.recorder.recorded", run.recorded):
                try:
                    loop.play(world.life(run, stop_at=stop_at))
                    loop.kill_at = None
                    loop.settle()
                    assert loop.waiting() == [], f"tasks are left: {loop.waiting()}"
                except KilledError:
                    world.seen["kills"] += 1
                    run = run.restarted(lives / str(number))
                    loop.drop()
            world.seen["lives"] += 1
        world.run = run
        world.check(run)
        world.seen["rows"] = len(run.rows)
    shutil.rmtree(lives)
    return world.seen
