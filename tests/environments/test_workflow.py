"""Whole rollouts over HTTP, against a real server that behaves in every way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gymdata.collect.task_shapes import TaskShape
from gymdata.collect.tasks import parse_task
from gymdata.environments.port import RemoteRequest, RemoteRollout
from gymdata.environments.workflow import HttpWorkflow
from gymdata.errors import OutsideError, UsageError
from tests.environments.env_server import Server, serving

ROW = {"task_id": "t0", "prompt": "1+2?", "answer": "3"}
SAMPLING = {"temperature": 0.5, "top_p": 1.0, "max_tokens": 16}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as up:
        yield up


def run(server: Server, **settings: Any) -> RemoteRollout:
    """One rollout of ``ROW``."""

    async def work() -> RemoteRollout:
        settings.setdefault("timeout_s", 5)
        workflow = HttpWorkflow(f"{server.url}/run", pause_s=0.01, **settings)
        await workflow.start()
        try:
            return await workflow.run(RemoteRequest("r0", parse_task(ROW, TaskShape()), 4, 7, SAMPLING))
        finally:
            await workflow.close()

    return asyncio.run(work())


def answered(server: Server, answer: Any, **settings: Any) -> RemoteRollout:
    """What becomes of one answer."""
    server.modes["/run"], server.answers["given"] = ["given"], answer if isinstance(answer, str) else json.dumps(answer)
    return run(server, max_retries=1, **settings)


def test_what_a_workflow_is_asked(server: Server) -> None:
    """The row, its messages, the settings to sample by and a seed; also as Responses parameters."""
    made = run(server, model="m")
    (sent,) = server.bodies("/run")
    asked = {k: sent[k] for k in ("task_id", "answer", "messages", "rollout_id", "rollout_index", "seed", "model")}
    task = {"task_id": "t0", "answer": "3", "messages": [{"role": "user", "content": "1+2?"}]}
    assert asked == task | {"rollout_id": "r0", "rollout_index": 4, "seed": 7, "model": "m"}
    assert sent["sampling"] == SAMPLING
    params = sent["responses_create_params"]
    assert (params["temperature"], params["max_output_tokens"]) == (0.5, 16)
    assert made.messages[-1] == {"role": "assistant", "content": "3"}
    assert made.generations == [None, None]
    assert made.verdict is not None
    assert (made.verdict.reward, made.verdict.extra) == (1.0, {"seen": 4})


def test_ids_are_taken_as_they_come(server: Server) -> None:
    """An assistant message with token lists is a model call; one without is a message only; messages that begin with the
    assistant follow on the task's."""
    first = {
        "role": "assistant", "content": "a", "prompt_token_ids": [1, 2], "generation_token_ids": [3],
        "generation_log_probs": [-0.5], "finish_reason": "length",
    }  # fmt: skip
    made = answered(
        server, {"messages": [first, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}
    )
    assert [m["role"] for m in made.messages] == ["user", "assistant", "user", "assistant"]
    assert made.messages[1] == {"role": "assistant", "content": "a"}
    assert [g is not None for g in made.generations] == [False, True, False, False]
    generation = made.generations[1]
    assert generation is not None
    assert (generation.prompt_token_ids, generation.token_ids, generation.log_probs) == ([1, 2], [3], [-0.5])
    assert generation.finish_reason == "length"
    assert made.verdict is not None
    assert made.verdict.reward is None


def test_ids_without_log_probs_have_none(server: Server) -> None:
    """A log-probability that was not given is NaN, never a number."""
    said = {"role": "assistant", "content": "a", "prompt_token_ids": [1], "generation_token_ids": [3, 4]}
    generation = answered(server, {"messages": [said]}).generations[-1]
    assert generation is not None
    assert np.isnan(generation.log_probs).all()
    assert len(generation.log_probs) == 2


def test_an_answer_in_the_responses_shape(server: Server) -> None:
    """Items with token lists, as NeMo Gym's agents answer at /run."""
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c", "prompt_token_ids": [1],
            "generation_token_ids": [2], "generation_log_probs": [-0.1]}  # fmt: skip
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}],
            "prompt_token_ids": [1, 2, 5], "generation_token_ids": [6], "generation_log_probs": [-0.2]}  # fmt: skip
    output = [call, {"type": "function_call_output", "call_id": "c", "output": "3"}, said]
    made = answered(
        server,
        {
            "responses_create_params": {"input": [{"role": "user", "content": "1+2?"}]},
            "response": {"output": output, "incomplete_details": {"reason": "max_output_tokens"}},
            "reward": 0.25,
        },
    )
    assert [m["role"] for m in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [g.token_ids if g else None for g in made.generations] == [None, [2], None, [6]]
    assert (made.truncated, made.stop_reason) == (True, "max_output_tokens")
    assert made.verdict is not None
    assert made.verdict.reward == 0.25


IDS = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        "[]",
        "{}",
        '{"messages": []}',
        '{"messages": "3"}',
        '{"messages": [{"content": "3"}]}',
        '{"messages": [{"role": "assistant", "content": 3}]}',
        '{"messages": [{"role": "user", "content": "3"}]}',
        '{"messages": [{"role": "assistant", "content": "3", "tool_calls": "add"}]}',
        '{"messages": [{"role": "assistant", "content": "3"}], "reward": NaN}',
        '{"messages": [{"role": "assistant", "content": "3"}], "reward": "good"}',
        '{"response": {"output": "3"}}',
        *(
            json.dumps({"messages": [{"role": "assistant", "content": "3", **IDS, **wrong}]})
            for wrong in (
                {"generation_token_ids": None},
                {"prompt_token_ids": None},
                {"prompt_token_ids": [1.5]},
                {"generation_token_ids": [-1]},
                {"generation_token_ids": [2**31]},
                {"generation_log_probs": [-0.5, -0.5]},
                {"generation_log_probs": ["low"]},
                {"generation_log_probs": [10**400]},
            )
        ),
    ],
)
def test_garbage_is_no_rollout(server: Server, answer: str) -> None:
    """What is no conversation, or has lists that do not fit, or a reward that is no number, is the environment's fault."""
    with pytest.raises(OutsideError) as caught:
        answered(server, answer)
    assert caught.value.system == "environment"


@pytest.mark.parametrize("fault", ["429", "500", "disconnect", "garbage"])
def test_passing_faults_cost_a_retry(server: Server, fault: str) -> None:
    """A rollout that failed in passing is asked for again: nothing of it was kept."""
    server.modes["/run"] = [fault, "ok"]
    assert run(server).messages[-1]["content"] == "3"


@pytest.mark.parametrize(("fault", "tries"), [("429", 3), ("500", 3), ("disconnect", 3), ("hang", 2), ("400", 1)])
def test_lasting_faults_are_the_environments(server: Server, fault: str, tries: int) -> None:
    """After a bounded number of tries; a request that is refused is not repeated."""
    server.modes["/run"] = [fault]
    with pytest.raises(OutsideError) as caught:
        run(server, max_retries=2, timeout_s=0.2)
    assert (caught.value.system, caught.value.fatal) == ("environment", False)
    assert len(server.bodies("/run")) == tries


def test_a_wrong_address_is_fatal(server: Server) -> None:
    """A path that is not there stops the command rather than every rollout by itself."""
    server.modes["/run"] = ["404"]
    with pytest.raises(OutsideError, match="404") as caught:
        run(server)
    assert caught.value.fatal
    with pytest.raises(UsageError, match="--workflow-url"):
        run(Server(url="localhost"))


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        ({"value": "It is 3."}, "$.value"),
        ({"value": {"messages": [{"role": "assistant", "content": "It is 3."}]}}, "$['value']"),
        ({"outputs": [{"text": "It is 4."}, {"text": "It is 3."}]}, "$.outputs[-1].text"),
    ],
)
def test_the_rollout_may_stand_inside_the_response(server: Server, answer: dict[str, Any], path: str) -> None:
    """``result_json_path`` leads to the object, or to the text of the last message, which is a rollout without ids."""
    made = answered(server, answer, result_json_path=path)
    assert [m["content"] for m in made.messages] == ["1+2?", "It is 3."]
    assert made.generations == [None, None]


def test_a_response_without_that_place_is_the_workflows_fault(server: Server) -> None:
    """The path is named; a number there is no rollout; a path to several places is refused before anything is sent."""
    for answer in ({"other": 1}, {"value": 3}):
        with pytest.raises(OutsideError, match=r"\$\['value'\]"):
            answered(server, answer, result_json_path="$.value")
    for path in ("$.a[*]", "value", "$..value", "$.a b"):
        with pytest.raises(UsageError, match="result_json_path"):
            run(server, result_json_path=path)
