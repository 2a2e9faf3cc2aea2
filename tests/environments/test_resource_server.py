"""Environments behind HTTP, against a real server; how that fails is in ``tests/test_faults.py``."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gymdata.commands.collect.task_shapes import TaskShape
from gymdata.commands.collect.tasks import parse_task
from gymdata.environments import load_environment, server_url
from gymdata.environments.resource_server import ResourceServer
from gymdata.environments.tool_error import MAX_OUTPUT_BYTES
from gymdata.errors import OutsideError, UsageError
from tests.environments.env_server import Server, serving

ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
ROW: dict[str, Any] = {"task_id": "t0", "answer": "3", "grading_mode": "x"}
ROW |= {"responses_create_params": {"input": "1+2?", "tools": [ADD]}}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as up:
        yield up


def call(name: str, arguments: Any, id_: str | None = None) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def play(server: Server, *said: dict[str, Any], stop: str | None = None, row: dict[str, Any] = ROW, **settings: Any):
    """One rollout in which the policy says these things; (messages, verdict)."""

    async def run() -> Any:
        settings.setdefault("pause_s", 0.01)
        settings.setdefault("tool_timeout_s", 5)
        environment = ResourceServer(server.url, **settings)
        try:
            task = parse_task(row, TaskShape())
            episode = await environment.start(task, 0)
            messages = list(episode.messages)
            for message in said:
                step = await episode.step(message)
                messages += [message, *step.messages]
            verdict = await episode.verdict(messages, stop)
            await episode.close()
            return messages, verdict
        finally:
            await environment.close()

    return asyncio.run(run())


ASK = {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 1, "b": 2}, "c1")]}
END = {"role": "assistant", "content": "It is 3"}


def test_a_rollout_is_seeded_stepped_and_verified(server: Server) -> None:
    """The session's cookie comes with every request, the whole row with seed and verify, the items with verify; what
    verify adds is kept, what it echoes is not."""
    messages, verdict = play(server, ASK, END)
    assert messages[2] == {"role": "tool", "name": "add", "content": "3", "tool_call_id": "c1"}
    assert [(path, cookie) for path, cookie, _ in server.asked] == [
        ("/seed_session", None),
        ("/add", "s1="),
        ("/verify", "s1="),
    ]
    assert server.bodies("/seed_session") == [ROW]
    assert server.bodies("/add") == [{"a": 1, "b": 2}]
    (sent,) = server.bodies("/verify")
    assert {key: sent[key] for key in ROW} == ROW
    types = [item.get("type") for item in sent["response"]["output"]]
    assert types == ["function_call", "function_call_output", "message"]
    assert json.loads(sent["response"]["output"][0]["arguments"]) == {"a": 1, "b": 2}
    assert sent["response"]["output"][0]["call_id"] == sent["response"]["output"][1]["call_id"] == "c1"
    assert sent["response"]["output"][2]["content"][0]["text"] == "It is 3"
    assert (verdict.reward, verdict.extra) == (0.5, {"graded_by": "s1="})


def test_calls_without_an_id_get_one(server: Server) -> None:
    """Two calls that the policy did not name are told apart in what is verified, each with its own output."""
    twice = [call("add", {"a": 1, "b": 1}), call("add", {"a": 2, "b": 2})]
    two = {"role": "assistant", "content": "", "tool_calls": twice}
    play(server, two, END)
    items = server.bodies("/verify")[0]["response"]["output"]
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    outputs = [(item["call_id"], item["output"]) for item in items if item["type"] == "function_call_output"]
    assert len(set(calls)) == 2
    assert outputs == [(calls[0], "2"), (calls[1], "4")]


def test_a_plain_task_is_sent_in_the_responses_shape(server: Server) -> None:
    """A row with prompt and tools gets responses_create_params; its own fields stay."""
    row = {"prompt": "1+2?", "tools": [ADD], "answer": "3"}
    play(server, END, row=row)
    (sent,) = server.bodies("/seed_session")
    assert sent["prompt"] == "1+2?"
    assert sent["responses_create_params"]["input"] == [{"role": "user", "content": "1+2?", "type": "message"}]
    assert sent["responses_create_params"]["tools"][0]["name"] == "add"


@pytest.mark.parametrize(
    ("stop", "status"), [(None, "completed"), ("max_turns", "completed"), ("max_tokens", "incomplete")]
)
def test_a_truncated_rollout_is_verified_too(server: Server, stop: str | None, status: str) -> None:
    """A generation that was cut makes the response incomplete; either way there is a verdict."""
    _, verdict = play(server, END, stop=stop)
    assert verdict.reward == 0.5
    assert server.bodies("/verify")[0]["response"]["status"] == status


@pytest.mark.parametrize(
    "wrong",
    [call("verify", {}), call("seed_session", {}), call("../verify", {}), call("nothing", {}), call("add", "a=1")],
)
def test_the_policy_reaches_its_tools_only(server: Server, wrong: dict[str, Any]) -> None:
    """A name that is no tool of the task, or arguments that are no object, are told to the policy; nothing is asked."""
    messages, _ = play(server, {"role": "assistant", "content": None, "tool_calls": [wrong]}, END)
    assert "error" in json.loads(messages[2]["content"])
    assert [path for path, _, _ in server.asked] == ["/seed_session", "/verify"]


def test_a_tool_named_verify_is_never_called(server: Server) -> None:
    """Even when the task lists it."""
    row = {**ROW, "responses_create_params": {"input": "x", "tools": [{**ADD, "name": "verify"}]}}
    play(server, {"role": "assistant", "content": None, "tool_calls": [call("verify", {})]}, END, row=row)
    assert len(server.bodies("/verify")) == 1


@pytest.mark.parametrize("status", ["400", "404", "422"])
def test_what_the_policy_did_wrong_is_told_to_it(server: Server, status: str) -> None:
    """A 4xx of a tool is the tool message, as the server wrote it."""
    server.modes["/add"] = [status]
    messages, verdict = play(server, ASK, END)
    assert messages[2]["content"] == json.dumps({"detail": f"told {status}"})
    assert verdict.reward == 0.5


def test_the_server_is_not_asked_before_it_wants_to_be(server: Server) -> None:
    """Retry-After is kept, up to the time limit of a try."""
    server.modes["/verify"], server.retry_after = ["429", "ok"], "0.3"
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("gymdata.http").asyncio, "sleep", sleep)
        play(server, END)
    assert [s for s in slept if s >= 0.3] == [0.3]


def test_a_masked_sample_has_no_reward(server: Server) -> None:
    """A server that says that its reward is unreliable is believed; why is kept."""
    server.modes["/verify"] = ["masked"]
    server.answers["masked"] = '{"reward": 0.0, "mask_sample": true, "failure_reason": "sandbox"}'
    _, verdict = play(server, END)
    assert (verdict.reward, verdict.extra) == (None, {"mask_sample": True, "failure_reason": "sandbox"})


def test_a_flood_is_cut(server: Server) -> None:
    """Ten megabytes of tool output are 64 KiB of tool message, and it says so."""
    server.modes["/add"], server.answers["flood"] = ["flood"], "x" * 10_000_000
    messages, _ = play(server, ASK, END)
    assert messages[2]["content"].endswith("are shown]")
    assert len(messages[2]["content"]) < MAX_OUTPUT_BYTES + 200


@pytest.mark.parametrize("mode", ["401", "403", "404"])
def test_a_wrong_address_stops_everything(server: Server, mode: str) -> None:
    """A server without /seed_session, or one that lets nobody in, is fatal: every other rollout would meet the same."""
    server.modes["/seed_session"] = [mode]
    with pytest.raises(OutsideError) as caught:
        play(server, END)
    assert caught.value.fatal
    assert caught.value.hint


def test_rollouts_do_not_share_sessions(server: Server) -> None:
    """Each of many rollouts in flight keeps its own cookie."""

    async def run() -> list[Any]:
        environment = ResourceServer(server.url)
        task = parse_task(ROW, TaskShape())
        try:
            episodes = await asyncio.gather(*(environment.start(task, i) for i in range(20)))
            return await asyncio.gather(*(episode.verdict([*episode.messages, END], None) for episode in episodes))
        finally:
            await environment.close()

    assert len({verdict.extra["graded_by"] for verdict in asyncio.run(run())}) == 20


def test_how_a_server_is_named() -> None:
    """A URL, with or without resources: before it, is a server; anything else is a file."""
    assert server_url("http://h:1") == server_url("resources:http://h:1") == "http://h:1"
    assert server_url("https://h") == "https://h"
    assert server_url("file.py:Name") is None
    assert server_url(None) is None
    with pytest.raises(UsageError, match=r"path\.py:name"):
        load_environment("resources:h:1")
