"""Ports × faults: what an engine, a server, a judge, an environment, a reward or an agent does wrong is never a score.

For each cell of ``TABLE`` the fault hits the rollouts of one of three tasks. A fault that passes leaves no trace. One that
stays leaves no number where it hit and every other one, is counted once for each rollout, and names its system; when the
port has recovered, the same command ends as if nothing had been.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gymdata.commands.collect.run import Parts, collect
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError
from tests import faulty_server
from tests.collect.fake_parts import parts
from tests.collect.saved_rows import failures_of, rows_of, samples_of
from tests.engine_fixtures import Borrowed, InProcess
from tests.faults import TRANSPORT, Fault, FaultyCode, How
from tests.servers import Watcher, serving

HANG_S, RETRIES = 0.5, 2
TASKS: list[dict[str, Any]] = [{"task_id": f"t{i}", "prompt": f"q{i}"} for i in range(3)]


@dataclass(frozen=True)
class Case:
    """One way in which a fault comes. ``says``: a part of the message; ``path``: the endpoint or method; ``tries``: how
    often a failing request is made; ``place``: where in the rollout it is."""

    how: How
    says: str
    path: str = ""
    tries: int = 1 + RETRIES
    place: str = "turn 0"

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
    """A command whose port misbehaves. ``hit``: the units that a fault may cost."""

    system: ClassVar[str]
    hit: ClassVar[int] = 2
    #: Requests for them, where each is not one.
    requests: ClassVar[int] = 2

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        self.folder, self.url = folder, ""
        self.fault: Any = FaultyCode()

    def serve(self, started: contextlib.ExitStack, app: Any, mark: str) -> str:
        """The URL of an application with a fault, which is none at first."""
        self.fault = Fault(mark=mark)
        app.middlewares.append(self.fault.middleware)
        return started.enter_context(serving(app))

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
        self.url = self.serve(started, faulty_server.build(faulty_server.Settings()), mark="113,49,300")

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


PORTS: dict[str, type[Port]] = {"server": Server}


def choice(**changed: Any) -> How:
    """The first choice of an answer with other values."""

    def changes(answer: Any) -> Any:
        first = answer["choices"][0]
        for name, value in changed.items():
            inside = first["logprobs"] if name in first["logprobs"] else first
            inside[name] = value(inside[name]) if callable(value) else value
        return answer

    return changes


def begin(value: Any) -> Any:
    """A list that begins with another value."""
    return lambda values: [value, *values[1:]]


def fails(error: Exception) -> How:
    """In the middle of an answer."""

    def raises(*_: Any) -> None:
        raise error

    return raises


def sets(part: int, **values: Any) -> How:
    """Other values in the answer of vLLM (part 0), its completion (1) or that one's log-probabilities (2)."""
    return lambda *parts: vars(parts[part]).update(values)


def transport(path: str) -> dict[str, Any]:
    """The faults of any server, as HttpClient names them."""
    says = {
        "429": "answered 429: spoiled",
        "500": "answered 500: spoiled",
        "garbage": "answer is not a JSON object: got '<html>",
        "half JSON": "answer is not a JSON object: got '{",
        "hang": f"did not answer within {HANG_S} s",
        "closed socket": "ServerDisconnectedError",
        "huge body": "bytes, more than requested",
    }
    tries = {"huge body": 1, "hang": 2}
    return {name: [Case(name, says[name], path, tries.get(name, 1 + RETRIES))] for name in TRANSPORT}


NO_HTTP = "between vLLM and this process is no HTTP"
TABLE: dict[str, dict[str, list[Case] | str]] = {
    "engine": {
        **dict.fromkeys(("429", "half JSON", "huge body"), NO_HTTP),
        "500": [
            Case(fails(RuntimeError("spoiled")), "RuntimeError: spoiled", tries=1),
            Case(fails(ValueError("spoiled")), "the request was refused: spoiled", tries=1),
        ],
        "garbage": [Case(sets(1, finish_reason="error"), "the request ended with finish_reason 'abort'", tries=1)],
        "hang": "there is no time limit but that of the rollout, which is truncated then (--time-limit)",
        "closed socket": "an engine that dies ends the run (tests/collect/test_collect_faults.py)",
        "wrong ids": [
            Case(sets(1, token_ids=[-1, 2]), "not in the vocabulary: got -1", tries=1),
            Case(sets(1, token_ids=[2**30, 2]), f"not in the vocabulary: got {2**30}", tries=1),
            Case(sets(0, prompt_token_ids=[302, 113]), "5 ids were sent and 2 read, and at position 2", tries=1),
            Case(sets(2, token_ids=[-5, 52, 2, 3]), "alternatives: the id at position", tries=1),
        ],
        "wrong lengths": [
            Case(sets(0, outputs=[]), "got 0 completions, expected 1", tries=1),
            Case(sets(2, start_indices=[0], end_indices=[2]), "log-probabilities for 2 generated ids", tries=1),
            Case(sets(1, token_ids=[51] * 2000), "2,000 tokens were generated, expected at most", tries=1),
        ],
        "NaN": [
            Case(sets(2, logprobs=[math.nan, -1.0, -1.0, -1.0]), "log-probability of token 0 is nan", tries=1),
            Case(sets(2, logprobs=[-1.0, -1.0, 0.5, -1.0]), "log-probability of token 1 is 0.5", tries=1),
            Case(sets(2, logprobs=[-9999.0, -1.0, -1.0, -1.0]), "-9999, a placeholder", tries=1),
        ],
        "duplicate ids": "a request asks it for one completion",
        "nobody there": NO_HTTP,
    },
    "server": {
        **transport("/v1/completions"),
        "wrong ids": [
            Case(choice(token_ids=begin(-1)), "not in the vocabulary: got -1, expected 0 to 399"),
            Case(choice(token_ids=begin(400)), "got 400, expected 0 to 399"),
            Case(choice(token_ids=begin(2**40)), f"got {2**40}, expected 0 to 399"),
            Case(choice(token_ids=begin(1.5)), "got 1.5, expected an integer"),
            Case(choice(token_ids=None), "does not return token ids"),
            Case(choice(prompt_token_ids=lambda ids: [0, *ids]), "5 ids were sent and 6 read, and at position 0 got 0"),
            Case(choice(top_logprobs=begin({"token_id:-5": -1.0})), "alternatives: the id at position 0"),
            Case(lambda answer: {**answer, "model": "other"}, "of model 'other', expected 'fake'"),
        ],
        "wrong lengths": [
            Case(choice(token_logprobs=lambda values: values[:-1]), "log-probabilities for"),
            Case(choice(token_logprobs=None), "does not return log-probabilities"),
            Case(choice(token_ids=[3] * 7, token_logprobs=[-1.0] * 7), "7 tokens were generated, expected at most 6"),
            Case(choice(top_logprobs=lambda rows: rows[:-1]), "got alternatives for"),
            Case(lambda answer: {**answer, "choices": answer["choices"][:1]}, "is not an answer with 2 choices"),
        ],
        "NaN": [
            Case(choice(token_logprobs=begin(math.nan)), "log-probability of token 0 is nan"),
            Case(choice(token_logprobs=begin(-math.inf)), "log-probability of token 0 is -inf"),
            Case(choice(token_logprobs=begin(1e-3)), "log-probability of token 0 is 0.001, expected at most 0"),
            Case(choice(token_logprobs=begin(-9999.0)), "-9999, a placeholder"),
            Case(choice(token_logprobs=begin(-(10**400))), "an integer beyond any float"),
            Case(choice(token_logprobs=begin("-1")), "got '-1', expected a number"),
        ],
        "duplicate ids": [Case(choice(index=1), "is not ids with one log-probability each")],
    },
}


def cells(*ports: str) -> list[tuple[str, str]]:
    return [(port, fault) for port in ports for fault, cases in TABLE[port].items() if isinstance(cases, list)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Between two tries of a request."""
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    yield
    os.environ.pop(FaultyCode.variable, None)


@pytest.mark.parametrize(("name", "fault"), cells(*PORTS))
def test_what_failed_is_never_a_score(name: str, fault: str, tmp_path: Path) -> None:
    """Each cell of a port in this process or of a real server."""
    with contextlib.ExitStack() as started:
        check_cell(PORTS[name](tmp_path, started), name, fault)


@pytest.mark.parametrize(("name", "fault"), cells("engine"))
def test_what_failed_in_the_engine_is_never_a_score(
    name: str, fault: str, tmp_path: Path, vllm_sampler: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell of vLLM in this process."""
    check_cell(Engine(tmp_path, vllm_sampler, monkeypatch), name, fault)


def check_cell(port: Port, name: str, fault: str) -> None:
    """Play without the fault, with it once, always, and when it is over."""
    cases = [case for case in TABLE[name][fault] if isinstance(case, Case)]
    good = port.play("good")
    assert (good.exit_code, good.failed, len(good.numbers)) == (0, [], len(good.units))
    if cases[0].tries > 1:
        port.fault.become(cases[0].how, cases[0].path, times=1)
        passing = port.play("passing", **cases[0].settings)
        assert (passing.exit_code, passing.failed, passing.numbers, port.fault.met) == (0, [], good.numbers, 1)
    for case in cases:
        port.fault.become(case.how, case.path)
        check_failed(port, case, port.play("run", **case.settings), good)
    port.fault.become(None)
    recovered = port.play("run")
    assert (recovered.exit_code, recovered.failed, recovered.numbers) == (0, [], good.numbers)
    assert sorted(recovered.units) == sorted(good.units)


def check_failed(port: Port, case: Case, lasting: Result, good: Result) -> None:
    """A command whose port failed two of its units says so of each of them once, and all others are as ever."""
    expected = [(port.system, case.place, True)] * port.hit
    assert [(fault["kind"], fault["place"], fault["counts"]) for fault in lasting.failed] == expected, case
    for fault in lasting.failed:
        assert fault["message"].startswith(f"{port.system}: ")
        assert case.says in fault["message"]
    assert case.says in lasting.said
    assert lasting.exit_code == 1
    assert len(set(lasting.units)) == len(lasting.units)
    assert lasting.numbers == {unit: number for unit, number in good.numbers.items() if unit in lasting.numbers}
    assert len(lasting.numbers) == len(good.numbers) - port.hit
    assert port.fault.met == case.tries * port.requests, case
