"""A command for each port of gymdata, whose port misbehaves at the rollouts of one of three tasks, and what it left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import gymdata
from gymdata.commands.collect.run import Parts, collect
from gymdata.commands.record.agent import load_agent
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.environments.resource_server import ResourceServer
from gymdata.errors import OutsideError
from gymdata.rewards.remote import RemoteReward
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.schema import COMPARISONS, SCORES
from gymdata.store import read_table
from tests import faulty_server, judge_server
from tests.collect.fake_parts import ROLE, FakeSampler, parts
from tests.collect.saved_rows import failures_of, rows_of, samples_of
from tests.engine_fixtures import Borrowed, InProcess
from tests.environments import env_server
from tests.faults import Fault, FaultyCode, How
from tests.record import workflow_server
from tests.record.scripted_engine import Letters
from tests.rollout_files import rollout, two_turns, write_run
from tests.score import reward_server
from tests.servers import Watcher, serving

#: Long enough for what answers, on a busy machine.
HANG_S, RETRIES = 1.0, 2
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TASKS: list[dict[str, Any]] = [{"task_id": f"t{i}", "prompt": f"q{i}"} for i in range(3)]


@dataclass(frozen=True)
class Case:
    """One way in which a fault comes. ``says``: a part of the message; ``path``: the endpoint or method; ``tries``: how
    often a failing request is made; ``place``: where in the rollout it is."""

    how: How
    says: str
    path: str = ""
    tries: int = 1 + RETRIES
    place: str = ""
    #: How many answers are spoiled, units fail and numbers are missing, where not as ever.
    met: int | None = None
    hit: int | None = None

    @property
    def settings(self) -> dict[str, float]:
        return {"timeout_s": HANG_S} if "hang" in str(self.how) else {}


@dataclass
class Result:
    """What a command left: ``units`` that it is about, the numbers of those that have one, and the failures of this call."""

    exit_code: int = 0
    units: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""


class Port:
    """A command whose port misbehaves. ``hit``: how many units a fault costs, by ``requests`` of the port; ``place`` and
    ``counts``: what their failures say."""

    system: ClassVar[str]
    hit: ClassVar[int] = 2
    lost: ClassVar[int | None] = None
    requests: ClassVar[int] = 2
    place: ClassVar[str] = "turn 0"
    counts: ClassVar[bool] = True

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        self.folder, self.url = folder, ""
        self.fault: Any = FaultyCode()

    def serve(self, started: contextlib.ExitStack, app: Any, mark: str) -> None:
        """Have the URL of an application with a fault, which is none at first."""
        self.fault = Fault(mark=mark)
        app.middlewares.append(self.fault.middleware)
        self.url = started.enter_context(serving(app))

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        raise NotImplementedError

    def collected(self, run: Path, playing: Parts, **settings: Any) -> Result:
        """Collect two rollouts of each task."""
        before = len(failures_of(run)) if run.exists() else 0
        watcher, result = Watcher(), Result()
        settings |= {"run_id": "one", "seed": 3, "num_rollouts": 2, "wait_for_server": 0.0, "max_attempts": 99}
        try:
            result.exit_code = collect(
                settings.pop("tasks", TASKS), output=run, parts=playing, progress=watcher, **settings
            ).exit_code
        except OutsideError as error:
            result.exit_code, result.said = error.exit_code, str(error)
        rows = rows_of(run)
        result.units = [f"{row['task_id']}-{row['rollout_index']}" for row in rows]
        contents = zip(result.units, rows, samples_of(rows), strict=True)
        result.numbers = {unit: content for unit, row, content in contents if row["reward"] is not None}
        result.failed = failures_of(run)[before:]
        result.said += "\n".join(watcher.said)
        return result


class Server(Port):
    """An engine behind a URL."""

    system, requests = "engine", 1  # a group is one request

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        super().__init__(folder, started)
        self.serve(started, faulty_server.build(faulty_server.Settings()), mark="113,49,300")

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        options = {"request_timeout_s": timeout_s, "max_retries": RETRIES, "vocab_size": 400}
        playing = parts(rewards=["regex:."])
        playing.sampler = ServerSampler(self.url, sampling={"top_logprobs": 2}, **options)
        return self.collected(self.folder / run, playing, max_tokens=6)


class Engine(Port):
    """vLLM in this process, whose ``generate`` is ours: a faulty answer is a change of a good one, or an error."""

    system = "engine"

    def __init__(self, folder: Path, engine: InProcess, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.engine, self.fault = folder, engine, Fault()
        patch.setattr("vllm.v1.engine.async_llm.AsyncLLM.generate", self.generate)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        flat = SimpleNamespace(start_indices=[0, 2], end_indices=[2, 4], token_ids=[51, 52, 2, 3], logprobs=[-1.0] * 4)
        said = SimpleNamespace(index=0, token_ids=[51, 2], logprobs=flat, finish_reason="stop", stop_reason=None)
        answer = SimpleNamespace(prompt_token_ids=list(ids), outputs=[said], num_cached_tokens=0)
        if self.fault.how is not None and bytes(i for i in ids if i < 256) == b"q1":
            self.fault.met += 1
            self.fault.how(answer, said, flat)
        yield answer

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        async def work() -> Result:
            playing = parts(rewards=["regex:."])
            playing.sampler = Borrowed(self.engine, asyncio.get_running_loop())
            return await asyncio.to_thread(self.collected, self.folder / run, playing)

        return self.engine.run(work())


class Judge(Port):
    """A judge behind a URL: the units are its comparisons, and its scores have numbers as well."""

    system, lost, place = "judge", 4, "failed"

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        super().__init__(folder, started)
        self.serve(started, judge_server.app_of(judge_server.Behaviour()), mark="question t1")

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        rows = [rollout(f"t{t}", k, 0.0, two_turns(1, 40 + k), text=f"q={2 + k}") for t in range(3) for k in range(2)]
        if not (folder := self.folder / run).exists():
            write_run(folder, rows)
        again = {
            "retries": RETRIES,
            "retry_pause": 0.0,
            "genrm_parse_retries": RETRIES,
            "genrm_parse_retry_sleep_s": 0.0,
        }
        try:
            code = gymdata.judge(
                folder, endpoint=self.url, model="judge", request_timeout=timeout_s, retry_unparsed=True,
                wait_for_server=0.0, **again,
            ).exit_code  # fmt: skip
        except OutsideError as error:
            return Result(error.exit_code, said=str(error))
        result, compared = Result(code), read_table(folder / "judge-judge", COMPARISONS).to_pylist()
        result.units = [row["comparison_id"] for row in compared]
        result.numbers = {
            row["comparison_id"]: (row["score_1"], row["score_2"], row["ranking"])
            for row in compared
            if row["status"] == "judged" or row["score_1"] is not None
        }
        scores = read_table(folder / "judge-judge", SCORES).to_pylist()
        result.units += [row["rollout_id"] for row in scores]
        result.numbers |= {row["rollout_id"]: row["value"] for row in scores if row["value"] is not None}
        for row in compared:
            if row["status"] != "judged":
                # An answer without a verdict is kept as it came.
                text = row["raw"] if row["status"] == "failed" else f"judge: {row['raw']}"
                result.failed.append({"kind": "judge", "place": row["status"], "counts": True, "message": text})
                result.said += text
        return result


class Reward(Port):
    """What scores rollouts while they are collected, and saved ones: two of each are hit."""

    system, hit, counts = "reward", 4, False
    name: ClassVar[str]
    plays = 0

    def scoring(self, timeout_s: float) -> dict[str, Any]:
        """Settings of ``score``."""
        raise NotImplementedError

    def rewarded(self, timeout_s: float) -> Parts:
        """Parts of ``collect``."""
        raise NotImplementedError

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        self.plays += 1
        fresh = self.folder / f"collected-{self.plays}"
        result = self.collected(fresh, self.rewarded(timeout_s), concurrency=1, reward_timeout=timeout_s)
        if not (saved := self.folder / run).exists():
            self.collected(saved, parts(), concurrency=1)
        try:
            summary = gymdata.score(saved, **self.scoring(timeout_s))
        except OutsideError as error:
            result.exit_code, result.said = error.exit_code, result.said + str(error)
            return result
        result.exit_code = max(result.exit_code, summary.exit_code)
        rows = read_table(saved / f"scores-{self.name}", SCORES).to_pylist()
        newest = {row["rollout_id"]: row for row in rows}
        result.units += newest
        result.numbers |= {unit: row["value"] for unit, row in newest.items() if row["value"] is not None}
        of_scores = {"kind": "reward", "place": self.place, "counts": False}
        failed = [row["detail"] for row in newest.values() if row["status"] == "failed"]
        result.failed += [{**of_scores, "message": detail} for detail in failed]
        return result


class RewardServer(Reward):
    """A reward behind a URL. A batch is requested again one by one."""

    name, place = "remote", "reward remote"

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        super().__init__(folder, started)
        self.serve(started, reward_server.app_of(reward_server.Behaviour()), mark="q1")
        self.url += reward_server.PATH

    def scoring(self, timeout_s: float) -> dict[str, Any]:
        return {"reward_url": self.url, "request_timeout": timeout_s, "request_batch": 4, "retries": RETRIES}

    def rewarded(self, timeout_s: float) -> Parts:
        remote = RemoteReward(self.url, timeout_s=timeout_s, max_retries=RETRIES)
        return replace(parts(), rewards=[Weighted(remote)])


class RewardFunction(Reward):
    """A reward function of the user's."""

    name, place = "length", "reward length"
    spec = f"{Path(__file__).with_name('faulty_code.py')}:length"

    def scoring(self, timeout_s: float) -> dict[str, Any]:
        return {"reward": self.spec, "reward_timeout": timeout_s}

    def rewarded(self, timeout_s: float) -> Parts:
        return parts(rewards=[self.spec])


def adds(prompt: Sequence[int], rng: random.Random) -> str:
    """Calls the tool once, and says a digit; a prompt q1 has arguments of its own."""
    if ROLE["tool"] in prompt:
        return rng.choice("0123")
    return f'CALL add {{"a": {77 if b"q1" in bytes(i for i in prompt if i < 256) else 1}, "b": 1}}'


class ResourceServers(Port):
    """An environment behind a URL."""

    system = "environment"

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        super().__init__(folder, started)
        self.serve(started, env_server.app_of(env_server.Server()), mark="q1|77")

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        limits = {"tool_timeout_s": timeout_s, "verify_timeout_s": timeout_s}
        served = ResourceServer(self.url, max_retries=RETRIES, **limits)
        playing = replace(parts(FakeSampler(adds)), environment=served)
        return self.collected(self.folder / run, playing, tasks=[{**task, "tools": [ADD]} for task in TASKS])


class PythonEnvironment(Port):
    """An environment in a Python file."""

    system = "environment"

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        spec = f"{Path(__file__).with_name('faulty_code.py')}:World"
        return self.collected(self.folder / run, parts(FakeSampler(adds), env=spec, tool_timeout_s=timeout_s))


class Workflow(Port):
    """An agent behind a URL, which is not requested again by itself."""

    system, place = "agent", "run"

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        super().__init__(folder, started)
        self.serve(started, env_server.app_of(workflow_server.Workflow()), mark="q1")

    def play(self, run: str, timeout_s: float = 60.0) -> Result:
        agent, model = workflow_server.AGENT, {"policy": "fake", "policy_hash": "fake-0"}
        os.environ.update(WORKFLOW_URL=f"{self.url}/run", WORKFLOW_TIMEOUT=str(max(timeout_s, 5.0)))
        playing = Parts(FakeSampler(), Letters(), None, [], model, agent=load_agent(agent))
        return self.collected(self.folder / run, playing, agent=agent)


PORTS: dict[str, type[Port]] = {
    "environment": ResourceServers, "Python environment": PythonEnvironment, "agent": Workflow,
    "server": Server, "judge": Judge, "reward URL": RewardServer, "reward function": RewardFunction
}  # fmt: skip
