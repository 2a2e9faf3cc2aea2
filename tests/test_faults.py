"""Ports × faults: what an engine, a server, a judge, an environment, a reward or an agent does wrong is never a score.

For each cell of ``TABLE`` the fault hits the rollouts of one of three tasks. A fault that passes leaves no trace. One that
stays leaves no number where it hit and every other one, is counted once for each rollout, and names its system; when the
port has recovered, the same command ends as if nothing had been.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_fixtures import InProcess
from tests.fault_ports import HANG_S, PORTS, RETRIES, Case, Engine, Port, Result
from tests.faults import FAULTS, NOWHERE, TRANSPORT, Fault, FaultyCode, How
from tests.score import reward_server


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


def says(text: str) -> How:
    """A judge says something else."""

    def changes(answer: Any) -> Any:
        answer["choices"][0]["message"]["content"] = text
        return answer

    return changes


def rewards(change: Any) -> How:
    """A reward server gives other rewards."""
    return lambda answer: {"rewards": change(answer["rewards"])}


def verdict(text: str) -> Case:
    """Text in which there is no verdict."""
    return Case(says(text), text[:40], place="unparsed")


def no_reward(value: Any, shown: str) -> Case:
    """A value of a reward server, for the last two rollouts of a request."""
    change = rewards(lambda given: [*given[:-2], *[value] * min(2, len(given))])
    return Case(change, f"the server gave {shown}, expected a finite number", tries=1, met=3)


def returns(value: str, shown: str) -> Case:
    """A value of a reward function."""
    return Case(value, shown, "length", tries=1)


def graded(value: Any, shown: str) -> Case:
    """A reward of /verify."""
    says = f"got {shown}, expected a finite number as reward"
    return Case(lambda answer: {**answer, "reward": value}, says, "/verify", tries=1, place="verdict")


def at(method: str, value: str, says: str) -> Case:
    """What a method of the environment does, in the turn in which that is."""
    turns = {"reset": "environment start", "respond": "turn 1", "get_reward": "turn 1"}
    return Case(value, says, method, tries=1, place=turns.get(method, "turn 0"))


def reported(value: Any) -> Case:
    """A reward that an agent reports."""
    return Case(lambda answer: {**answer, "reward": value}, "expected a finite number as reward", tries=1)


def endpoints(name: str, *paths: str) -> list[Case]:
    """A fault of a resource server at each of its endpoints. A tool call that may have been carried out is made once."""
    places = {"/seed_session": "environment start", "/add": "turn 0", "/verify": "verdict"}
    (case,) = transport("")[name]
    once = {"/add"} if name in ("hang", "closed socket") else set()
    paths = paths or tuple(places)
    return [replace(case, path=path, place=places[path], tries=1 if path in once else case.tries) for path in paths]


def transport(path: str) -> dict[str, Any]:
    """The faults of any server, as HttpClient names them."""
    says = {
        "429": "answered 429: spoiled",
        "500": "answered 500: spoiled",
        "garbage": "answer is not a JSON object: got '<html>",
        "half JSON": "answer is not a JSON object: got '{",
        "hang": f"did not answer within {HANG_S:g} s",
        "closed socket": "ServerDisconnectedError",
        "huge body": "bytes, more than requested",
    }
    tries = {"huge body": 1, "hang": 2}
    return {name: [Case(name, says[name], path, tries.get(name, 1 + RETRIES))] for name in TRANSPORT}


#: An integer beyond any float, as a message has it.
HUGE = f"1{'0' * 37} … {'0' * 39} (401 characters)"
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
    "judge": {
        **(of_judge := transport("/chat/completions")),
        # Asked again without the schema of a verdict, which might be what it cannot do.
        "huge body": [replace(of_judge["huge body"][0], place="refused", met=4)],
        "garbage": [
            *of_judge["garbage"],
            Case(lambda answer: {"choices": []}, "the answer is no chat completion"),
            Case(lambda answer: {**answer, "error": {"code": 502}}, "the answer is no chat completion"),
            verdict("Both are fine, I like the first."),
            verdict("{" * 16_000),
        ],
        "half JSON": [*of_judge["half JSON"], verdict('{"score_1": 4, "sco')],
        "wrong ids": "a verdict names its responses by their positions",
        "wrong lengths": [verdict('{"score_1": 5}')],
        "NaN": [
            verdict('{"score_1": NaN, "score_2": 2, "ranking": 1}'),
            verdict('{"score_1": 99, "score_2": 99, "ranking": 99}'),
        ],
        "duplicate ids": "of several verdicts the last counts (tests/judge/test_judge.py)",
    },
    "environment": {
        **{name: endpoints(name) for name in ("429", "500", "hang", "closed socket", "huge body")},
        # What a tool answers is for the policy, and what /seed_session answers for nobody.
        "garbage": [
            *endpoints("garbage", "/verify"),
            Case(lambda _: [1], "is not a JSON object: got '[1]'", "/verify", place="verdict"),
        ],
        "half JSON": endpoints("half JSON", "/verify"),
        "wrong ids": "what it says is of the session of the request's cookie",
        "wrong lengths": [graded([0.5, 0.5], "[0.5, 0.5]")],
        "NaN": [
            graded(math.nan, "nan"),
            graded(-math.inf, "-inf"),
            graded("1", "'1'"),
            graded(True, "True"),
            graded(None, "None"),
            graded(10**400, HUGE),
            Case(lambda _: {"graded": True}, "got no reward, expected", "/verify", tries=1, place="verdict"),
        ],
        "duplicate ids": "its cookies are its own",
    },
    "Python environment": {
        "429": [
            at(name, "refused(429)", f"{name} raised HTTPError: HTTP Error 429: spoiled")
            for name in ("reset", "respond", "step_reward", "get_reward")
        ],
        "500": [at("respond", "refused(500)", "respond raised HTTPError: HTTP Error 500: spoiled")],
        "garbage": [
            at("respond", "object()", "respond gave <object object"),
            at("get_reward", "{}", "get_reward gave {}, expected a finite number or None"),
            at("step_reward", "Step('text')", "step_reward gave a Step with content, expected a reward alone"),
        ],
        "half JSON": [at("get_reward", """'{"rew'""", "expected a finite number or None")],
        "hang": [
            at("add", "hang()", f"tool add gave no answer within {HANG_S:g} s"),
            *(
                at(name, "hang()", f"{name} gave no answer within {HANG_S:g} s")
                for name in ("reset", "respond", "step_reward", "get_reward")
            ),
        ],
        "closed socket": [at("reset", "drop()", "reset raised ConnectionResetError: spoiled")],
        "wrong ids": [
            at("respond", "{'role': 'tool', 'tool_call_id': 'c9', 'content': 'x'}", "respond gave {'role': 'tool'"),
            at("respond", "{'role': 'assistant', 'content': 'x'}", "respond gave {'role': 'assistant'"),
        ],
        "wrong lengths": [
            at("get_reward", "[1.0, 2.0]", "get_reward gave [1.0, 2.0], expected a finite number or None")
        ],
        "NaN": [
            at("get_reward", "float('nan')", "get_reward gave nan, expected a finite number or None"),
            at("get_reward", "-float('inf')", "get_reward gave -inf"),
            at("get_reward", "10**400", "get_reward gave 1000000"),
            at("step_reward", "float('nan')", "step_reward gave nan"),
            at("add", "Step('3', reward=float('nan'))", "the reward of a tool gave nan"),
        ],
        # A long output of a tool is cut, and says so.
        "huge body": [
            at("get_reward", "10**5000", "get_reward gave a value of type int, expected a finite number or None")
        ],
        "duplicate ids": "it has no ids",
        "nobody there": "it is in this process",
    },
    "agent": {
        **{
            name: [replace(cases[0], says=says, tries=1)]
            for (name, cases), says in zip(
                transport("/run").items(),
                (
                    "the workflow: HTTP 429: ",
                    "the workflow: HTTP 500: ",
                    "raised JSONDecodeError",
                    "raised JSONDecodeError",
                    "raised TimeoutError: timed out",
                    "raised RemoteDisconnected",
                    "raised IncompleteRead",
                ),
                strict=True,
            )
        },
        "wrong ids": "of another session, its calls are refused (tests/record/test_served_workflow.py)",
        "wrong lengths": [reported([1.0])],
        "NaN": [reported(value) for value in (math.nan, math.inf, "good", True, 10**400)],
        "duplicate ids": "it has no ids but its session's",
        "nobody there": "what an agent cannot reach is as a closed socket: its own fault",
    },
    "reward URL": {
        **{
            name: [replace(case, met={"huge body": 5}.get(name, 11)) for case in cases]
            for name, cases in transport(reward_server.PATH).items()
        },
        # A server that hangs would hang for each rollout of the batch.
        "hang": [Case("hang", f"did not answer within {HANG_S:g} s", tries=2, met=6, hit=6)],
        "wrong ids": "its rewards have no ids: they are in the order of the queries",
        "wrong lengths": [
            Case(rewards(lambda given: given[:-1]), "rewards, expected", met=9, hit=6),
            Case(rewards(lambda given: [*given, 1.0]), "rewards, expected", met=9, hit=6),
            Case(lambda answer: {"scores": answer["rewards"]}, 'is not an object with a list "rewards"', met=11),
        ],
        "NaN": [
            no_reward(math.nan, "nan"),
            no_reward(math.inf, "inf"),
            no_reward(None, "None"),
            no_reward("0.5", "'0.5'"),
            no_reward(True, "True"),
            no_reward([0.5], "[0.5]"),
            no_reward(10**400, HUGE),
        ],
        "duplicate ids": "its rewards have no ids",
    },
    "reward function": {
        "429": [returns("refused(429)", "raised HTTPError: HTTP Error 429: spoiled")],
        "500": [returns("refused(500)", "raised HTTPError: HTTP Error 500: spoiled")],
        "garbage": [returns("{}", "returned {} for a rollout, expected a finite number or None")],
        "half JSON": [returns("""'{"sco'""", "for a rollout, expected a finite number or None")],
        # Whatever is scored together waits together.
        "hang": [replace(returns("hang()", f"no answer within {HANG_S:g} s"), hit=8)],
        "closed socket": [returns("drop()", "raised ConnectionResetError: spoiled")],
        "wrong ids": "its values have no ids",
        "wrong lengths": [returns("[1.0, 2.0, 3.0]", "returned 3 values for a rollout with 1 turn")],
        "NaN": [
            returns("float('inf')", "returned inf for a rollout, expected a finite number or None"),
            returns("10**400", "expected a finite number or None"),
            returns("'1'", "returned '1' for a rollout, expected a finite number or None"),
        ],
        "huge body": [returns("'x' * 10**7", "expected a finite number or None")],
        "duplicate ids": "its values have no ids",
        "nobody there": "it is in this process",
    },
}


#: Faults that are read where another one is: 500, and garbage.
FULL = ("429", "half JSON")


def cells(*ports: str) -> list[Any]:
    """Of these ports, those with cases."""
    there = [(port, fault) for port in ports for fault, cases in TABLE[port].items() if isinstance(cases, list)]
    return [pytest.param(*cell, marks=pytest.mark.full if cell[1] in FULL else ()) for cell in there]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Between two tries of a request."""
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    yield
    for name in (FaultyCode.variable, "WORKFLOW_URL", "WORKFLOW_TIMEOUT"):
        os.environ.pop(name, None)


@pytest.mark.parametrize(("name", "fault"), cells(*PORTS))
def test_what_failed_is_never_a_score(name: str, fault: str, tmp_path: Path) -> None:
    """Each cell of a port in this process or of a real server."""
    with contextlib.ExitStack() as started:
        check_cell(PORTS[name](tmp_path, started), name, fault)


@pytest.mark.parametrize("name", [name for name in PORTS if "nobody there" not in TABLE[name]])
def test_a_server_that_is_not_there_ends_the_command(name: str, tmp_path: Path) -> None:
    """With exit code 3 and a message that names the system; nothing has a number, and no attempt is counted."""
    with contextlib.ExitStack() as started:
        port = PORTS[name](tmp_path, started)
        port.url, url = NOWHERE, port.url
        gone = port.play("run")
        assert (gone.exit_code, gone.numbers) == (3, {})
        assert f"{port.system}: {NOWHERE} cannot be reached: nothing answers" in gone.said
        assert not any(fault["counts"] for fault in gone.failed)
        port.url = url
        recovered, good = port.play("run"), port.play("good")
    assert (recovered.exit_code, recovered.failed, recovered.numbers) == (0, [], good.numbers)


def test_every_port_has_every_fault() -> None:
    """As a cell, or with the reason why there is none."""
    tested_apart = {"nobody there"}
    assert [set(FAULTS) - set(row) - tested_apart for row in TABLE.values()] == [set()] * len(TABLE)


@pytest.mark.parametrize(("name", "fault"), cells("engine"))
def test_what_failed_in_the_engine_is_never_a_score(
    name: str, fault: str, tmp_path: Path, vllm_sampler: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell of vLLM in this process."""
    check_cell(Engine(tmp_path, vllm_sampler, monkeypatch), name, fault)


#: What each port leaves without a fault, which is always the same.
GOOD: dict[str, Result] = {}


def check_cell(port: Port, name: str, fault: str) -> None:
    """Play without the fault, with it once, always, and when it is over."""
    cases = [case for case in TABLE[name][fault] if isinstance(case, Case)]
    good = GOOD.get(name) or GOOD.setdefault(name, port.play("good"))
    assert (good.exit_code, good.failed, len(good.numbers)) == (0, [], len(good.units))
    first = {case.path: case for case in reversed(cases) if case.tries > 1}
    for number, case in enumerate(first.values()):
        port.fault.become(case.how, case.path, times=1)
        passing = port.play(f"passing-{number}", **case.settings)
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
    hit = case.hit or port.hit
    expected = [(port.system, case.place or port.place, port.counts)] * hit
    assert [(fault["kind"], fault["place"], fault["counts"]) for fault in lasting.failed] == expected, case
    for fault in lasting.failed:
        assert fault["message"].startswith(f"{port.system}: ")
        assert case.says in fault["message"]
        assert len(fault["message"]) < 500 or fault["place"] == "unparsed"
        if port.system in ("environment", "agent"):
            assert bool(fault["turns"]) == (fault["place"] != "environment start")
    assert case.says in lasting.said
    assert lasting.exit_code == 1
    assert len(set(lasting.units)) == len(lasting.units)
    assert lasting.numbers == {unit: number for unit, number in good.numbers.items() if unit in lasting.numbers}
    assert len(lasting.numbers) == len(good.numbers) - (port.lost or hit)
    if isinstance(port.fault, Fault):
        assert port.fault.met == (case.met or case.tries * port.requests), case
