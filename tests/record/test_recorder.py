"""What the recorder answers and writes: endings, budgets, faults of the engine, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.record.dialects import DIALECTS
from gymdata.commands.record.ending import Ending
from gymdata.commands.record.report import RecordSummary
from gymdata.commands.record.request import Client, RequestError
from gymdata.commands.record.settings import RecordConfig
from gymdata.commands.validate.run import validate
from gymdata.errors import OutsideError, UsageError
from gymdata.store import read_failures, read_run_json
from tests.record.scripted_engine import recording


def test_a_finish_gives_status_rewards_and_task(tmp_path: Path) -> None:
    """Two rollouts of one task have one group and two indexes; a second finish changes nothing."""
    task = {"task_id": "t", "prompt": "x", "answer": "4"}
    with recording(tmp_path / "run", "3", "4") as r:
        for key, reward in (("one", 0.0), ("two", 1.0)):
            r.said("x", key=key)
            ended = r.finish(key, reward=reward, rewards={"exact": reward, "style": 0.5}, task=task, status="truncated",
                             stop_reason="steps")  # fmt: skip
            assert r.finish(key, reward=reward) == ended
            assert r.client.get(f"/rollouts/{key}").json() == ended
    one, two = r.rows()
    assert (one["group_id"], one["task_id"]) == (two["group_id"], "t")
    assert [row["rollout_index"] for row in (one, two)] == [0, 1]
    assert [row["reward"] for row in (one, two)] == [0.0, 1.0]
    assert one["rewards"] == [{"name": "exact", "value": 0.0}, {"name": "style", "value": 0.5}]
    assert (one["status"], one["stop_reason"]) == ("truncated", "steps")
    assert json.loads(one["task"]) == task


def test_ids_behind_a_stop_text_are_neither_continued_nor_trained(tmp_path: Path) -> None:
    """The client, the row and the next prompt end with the stop text, and the row says how many ids were cut of which
    turn."""
    with recording(tmp_path / "run", "12!No, 99", "4") as r:
        r.sampler.finish = ("stop", "!")
        answer = r.said("x", stop=["!"])
        assert answer["content"] == "12"
        r.sampler.finish = ("stop", None)
        r.said("x", answer, "y")
        assert "12!" in r.prompts()[1]
        assert "No" not in r.prompts()[1]
        r.finish(reward=1.0)
    row = r.row()
    assert bytes(row["turns"][0]["generation_token_ids"]) == b"12!"
    assert json.loads(row["extra"])["ids_behind_stop"] == [{"turn": 0, "ids": 7}]
    assert [turn["parent"] for turn in row["turns"]] == [-1, 0]


def test_a_generation_that_repeats_itself_is_answered_as_cut(tmp_path: Path) -> None:
    """vLLM's finish_reason repetition is a turn of that name; its client reads length, the word that it knows."""
    with recording(tmp_path / "run", "12") as r:
        r.sampler.finish = ("repetition", "repetition_detected")
        choice = r.chat("x").json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("12", "length")
        r.finish(reward=0.0)
    assert r.row()["turns"][0]["finish_reason"] == "repetition"


ENDING = {"reward": 0.5, "rewards": {"style": 0.5}, "status": "truncated", "task_id": "t", "task": {"answer": "4"}}
OTHERS: list[dict[str, Any]] = [{}, {"reward": 0.25}, {"status": "completed"}, {"status": "failed"}, {"task_id": "u"}]


@pytest.mark.parametrize("rewards", [[], ["numeric"]])
def test_a_second_finish_is_answered_with_how_the_session_ended(tmp_path: Path, rewards: list[str]) -> None:
    """Whatever it says, also by the recorder that resumes the run: the rollout stays as it is."""
    with recording(tmp_path / "run", "3", rewards=rewards) as r:
        r.said("x")
        ended = r.finish(**ENDING)
        assert (ended["status"], ended["task_id"]) == ("truncated", "t")
    for _ in range(2):
        with recording(tmp_path / "run", rewards=rewards) as r:
            for body in (ENDING, *OTHERS):
                assert r.finish(**body) == ended
    assert len(r.rows()) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"reward": 1, "rewards": {}},
        {"reward": 2**53 + 1, "rewards": {"a": 2**53 + 1}},
        {"task_id": "", "stop_reason": ""},
        {"task_id": "5", "task": {"task_id": 5}},
        {"task": {"task_id": ""}},
        {"task_id": 0},
        {"task": {}},
        {"status": "failed", "stop_reason": "exit 1"},
    ],
)
def test_a_finish_that_is_sent_again_is_answered_as_before(tmp_path: Path, body: dict[str, Any]) -> None:
    """Whatever it says, and also by the recorder that resumes the run."""
    with recording(tmp_path / "run", "a") as r:
        r.said("x")
        first = r.finish(**body)
        assert r.finish(**body) == first
        before = r.client.get("/rollouts/k").json()
    with recording(tmp_path / "run") as r:
        assert r.client.get("/rollouts/k").json() == before
        assert r.finish(**body) == first


def test_a_finish_after_a_budget_may_be_sent_again(tmp_path: Path) -> None:
    """It ended as truncated although the client says completed: twice the same is no conflict."""
    with recording(tmp_path / "run", "a", max_turns=1) as r:
        first = r.said("x")
        assert r.chat("x", first, "y").status_code == 403
        ended = r.finish(status="completed", reward=1.0)
        assert (ended["status"], r.finish(status="completed", reward=1.0)) == ("truncated", ended)


@pytest.mark.parametrize(
    "body",
    [
        {"reward": "1"},
        {"reward": True},
        {"status": "done"},
        {"rewards": [1]},
        {"score": 1},
        {"task_id": "t", "task": {"task_id": "u"}},
    ],
)
def test_a_finish_that_is_no_ending_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    """By the name of the field, and the session stays open."""
    with recording(tmp_path / "run", "a") as r:
        r.said("x")
        answer = r.end(**body)
        assert answer.status_code == 400
        assert next(iter(body)) in answer.json()["error"]["message"]
        assert "k" in r.recorder.sessions


def test_a_failed_attempt_is_a_failure_with_its_turns_and_no_row(tmp_path: Path) -> None:
    """And its key is free again."""
    with recording(tmp_path / "run", "a", "b") as r:
        r.said("x")
        assert r.finish(status="failed", stop_reason="exit 1")["status"] == "failed"
        r.said("x")
        r.finish()
    (failure,) = read_failures(tmp_path / "run")
    assert (failure["kind"], len(failure["turns"]), "exit 1" in failure["message"]) == ("environment", 1, True)
    assert r.row()["messages"][-1]["content"] == "b"


def test_an_engine_that_fails_is_an_error_and_a_failure_and_no_turn(tmp_path: Path) -> None:
    """In the words of each dialect, with when to come again; the client goes on where it was."""
    fault = OutsideError("engine", "out of luck")
    with recording(tmp_path / "run", fault, fault, "a") as r:
        answer = r.chat("x")
        assert (answer.status_code, answer.headers["retry-after"]) == (502, "1")
        assert "out of luck" in answer.json()["error"]["message"]
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        answer = r.client.post("/s/k/v1/messages", json=body)
        assert (answer.status_code, answer.json()["type"]) == (502, "error")
        assert r.said("x")["content"] == "a"
        assert r.finish()["turns"] == 1
        assert r.recorder.counts["upstream_failures_total"] == 2
    assert [f["kind"] for f in read_failures(tmp_path / "run")] == ["engine", "engine"]


@pytest.mark.parametrize(
    ("settings", "stop_reason"), [({"max_turns": 1}, "max_turns"), ({"max_tokens_total": 2}, "max_tokens_total")]
)
def test_a_budget_ends_a_session_as_truncated(tmp_path: Path, settings: dict[str, Any], stop_reason: str) -> None:
    """The next request gets an error that names the flag; the row has no reward."""
    with recording(tmp_path / "run", "a", "b", **settings) as r:
        first = r.said("x")
        answer = r.chat("x", first, "y")
        assert answer.status_code == 403
        assert f"--{stop_reason.replace('_', '-')}" in answer.json()["error"]["message"]
        r.finish()
    row = r.row()
    assert (row["status"], row["stop_reason"], row["reward"], row["n_turns"]) == ("truncated", stop_reason, None, 1)


def test_a_budget_that_was_used_up_is_known_after_a_restart(tmp_path: Path) -> None:
    """Whether it was before or after the session's first call was recorded."""
    with recording(tmp_path / "run", "a|", "b", max_turns=1) as r:

        async def during() -> str:
            async def another() -> None:
                request = chat.read({"messages": [{"role": "user", "content": "y"}]}, {})
                with pytest.raises(RequestError, match="max-turns"):
                    await r.recorder.complete(r.recorder.sessions["first"], request, Client())

            r.sampler.pause = another
            chat = DIALECTS["chat"].object()
            request = chat.read({"messages": [{"role": "user", "content": "x"}]}, {})
            session = r.recorder.session_for("first", request)
            return (await r.recorder.complete(session, request, Client())).content

        assert asyncio.run(during()) == "a|"
        r.said("x", key="second")
        assert [r.chat("y", key="second").status_code for _ in range(2)] == [403, 403]
    with recording(tmp_path / "run", max_turns=1) as r:
        for key in ("first", "second"):
            assert r.client.get(f"/rollouts/{key}").json()["ended_by"] == "max_turns"
            assert r.finish(key, status="completed")["stop_reason"] == "max_turns"


def test_a_completion_is_cut_to_what_is_left_of_a_budget(tmp_path: Path) -> None:
    """By --max-tokens-total, and the session goes on until nothing is left."""
    with recording(tmp_path / "run", *["aaaa"] * 2, max_tokens_total=5) as r:
        first = r.said("x", max_tokens=2)
        choice = r.chat("x", first, "y", max_tokens=9).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("aaa", "length")
        assert r.finish()["turns"] == 2
    row = r.row()
    assert (row["status"], row["n_generated_tokens"]) == ("completed", 5)


def test_a_session_without_requests_ends_as_truncated(tmp_path: Path) -> None:
    """After --idle-timeout, without a reward."""
    with recording(tmp_path / "run", "a", idle_timeout=1e-9) as r:
        r.said("x")
        assert r.client.portal is not None
        r.client.portal.call(r.recorder.end_idle)
        assert not r.recorder.sessions
    row = r.row()
    assert (row["status"], row["stop_reason"], row["reward"]) == ("truncated", "idle_timeout", None)


def test_max_tokens_beyond_the_context_is_clamped_and_recorded(tmp_path: Path) -> None:
    """As coding agents ask for 32,000; a prompt without room is refused as too long."""
    with recording(tmp_path / "run", "abcdefgh", context=8) as r:
        response = r.chat("x", max_tokens=32_000)
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert r.sampler.requests[0].max_tokens == 4
        assert r.chat("xxxxxxxx", key="other").status_code == 400
        r.finish()
    assert json.loads(r.row()["extra"])["clamped"] == [{"turn": 0, "max_tokens": 32_000, "used": 4}]


def test_what_a_client_chooses_is_sampled_and_recorded(tmp_path: Path) -> None:
    """The temperature is the row's; what biases log-probabilities is in the run's identity, where training looks."""
    with recording(tmp_path / "run", "a", "b") as r:
        r.said("x", temperature=0.5, top_p=0.9)
        assert r.sampler.requests[0].sampling == {"temperature": 0.5, "top_p": 0.9}
        r.finish()
    row = r.row()
    assert row["temperature"] == 0.5
    assert json.loads(row["extra"])["sampling"] == [{"turn": 0, "temperature": 0.5, "top_p": 0.9}]
    assert read_run_json(tmp_path / "run")["identity"]["sampling"] == {"top_p": 0.9}
    assert "L304" in {v.code for v in validate(tmp_path / "run").violations}


def test_the_head_is_recorded_whatever_clients_request(tmp_path: Path) -> None:
    """With --top-logprobs 3 every token has three ids; a client reads as many as it asked for, and may ask for more."""
    with recording(tmp_path / "run", "a", "b", "c", top_logprobs=3) as r:
        r.sampler.alternatives = 3
        assert r.chat("x").json()["choices"][0].get("logprobs") is None
        some = r.chat("y", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in some] == [2, 2]
        r.chat("z", logprobs=True, top_logprobs=5)
        assert [(q.sampling or {}).get("top_logprobs") for q in r.sampler.requests] == [None, None, 5]
        r.finish()
    turns = [turn for row in r.rows() for turn in row["turns"]]
    assert sorted({len(head) for turn in turns for head in turn["top_log_probs"]}) == [3, 5]


def test_a_call_that_does_not_parse_is_text_and_marked(tmp_path: Path) -> None:
    """The client sees what the model wrote."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with recording(tmp_path / "run", "<tool_call>{") as r:
        assert r.said("x", tools=tools)["content"] == "<tool_call>{"
        assert r.recorder.counts["unparsed_calls_total"] == 1
        r.finish()
    assert json.loads(r.row()["messages"][-1]["extra"]) == {"unparsed_call": True}


def test_a_killed_recorder_goes_on_with_the_same_keys(tmp_path: Path) -> None:
    """Every state of the files between two calls resumes: nothing lost, nothing doubled, and the held ids continue."""
    killed = tmp_path / "killed"
    with recording(tmp_path / "run", "a", "b", "c") as r:
        first = r.said("x", key="one")
        r.said("y", key="two")
        r.finish("two", reward=1.0)
        shutil.copytree(tmp_path / "run", killed)
        # The row is written and the session's journal is still there.
        r.said("z", key="three")
        sessions = {path.name: path.read_bytes() for path in (tmp_path / "run" / "sessions").iterdir()}
        r.finish("three")
    for name, content in sessions.items():
        (tmp_path / "run" / "sessions").mkdir(exist_ok=True)
        (tmp_path / "run" / "sessions" / name).write_bytes(content)
    with recording(tmp_path / "run") as r:
        assert list(r.recorder.sessions) == ["one"]
    with (killed / "sessions" / "open.journal").open("ab") as file:
        file.write(b'{"torn')
    with recording(killed, "d") as r:
        assert r.chat("y", key="two").status_code == 409
        r.said("x", first, "w", key="one")
        assert r.prompts() == ["/x//a//w//"]
        r.finish("one", reward=0.0)
    assert sorted(row["n_turns"] for row in r.rows()) == [1, 2]
    assert not list((killed / "sessions").glob("*.journal"))


def test_sessions_are_named_by_path_key_or_header(tmp_path: Path) -> None:
    """And a request that only counts tokens begins none."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with recording(tmp_path / "run", *"abcd") as r:
        assert r.client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 4}
        assert not r.recorder.sessions
        r.client.post("/v1/messages", json=body, headers={"x-api-key": "gymdata-one"})
        r.client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer gymdata-two"})
        r.client.post("/v1/chat/completions", json=body, headers={"session-id": "three"})
        # OpenCode's sub-agents have sessions of their own, and belong to those of their parents.
        r.client.post("/v1/messages", json=body, headers={"x-session-id": "four", "x-parent-session-id": "three"})
        assert list(r.recorder.sessions) == ["one", "two", "three"]
        assert r.client.post("/s/a%20b/v1/messages", json=body).status_code == 400
        assert r.client.get("/v1/models").json()["data"][0]["id"] == "fake"
        assert r.client.get("/health").json()["sessions_open"] == 3


def test_conversations_with_the_same_prompt_are_attempts_at_one_task(tmp_path: Path) -> None:
    """Without a key: one group for each prompt with its tools, whatever follows it."""
    with recording(tmp_path / "run", "a", "b", "c", "d") as r:
        for said in ("x", "x", "y"):
            r.said(said, key="")
            (key,) = r.recorder.sessions
            r.finish(key)
    first, second, other = r.rows()
    assert first["group_id"] == second["group_id"] != other["group_id"]
    assert (first["task_id"], first["rollout_index"], second["rollout_index"]) == (second["task_id"], 0, 1)
    assert len({row["rollout_id"] for row in (first, second, other)}) == 3


def test_a_session_that_nobody_continued_is_no_completed_rollout(tmp_path: Path) -> None:
    """Of what an earlier command left open, only what this one continued ends as it does."""
    with recording(tmp_path / "run", "a", "b", "c") as r:
        r.said("x", key="old")
        began = time.time()
        first = r.said("y", key="new")
        asyncio.run(r.recorder.end_all(Ending("truncated", "interrupted"), before=began))
        r.said("y", first, "z", key="new")
        r.finish("new")
    ended = {json.loads(row["task"])["prompt"]: (row["status"], row["stop_reason"]) for row in r.rows()}
    assert ended == {"x": ("truncated", "interrupted"), "y": ("completed", None)}


def test_a_path_that_is_not_served_is_named_with_those_that_are(tmp_path: Path) -> None:
    """A base URL without /v1 is the usual slip."""
    with recording(tmp_path / "run") as r:
        answer = r.client.post("/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


def test_a_token_is_asked_for_and_never_written(tmp_path: Path) -> None:
    """TOKEN, or gymdata-KEY:TOKEN; no other machine is served without one."""
    with recording(tmp_path / "run", "a", token="secret-token") as r:
        assert r.chat("x").status_code == 401
        assert r.client.get("/rollouts/k").status_code == 401
        r.headers["authorization"] = "Bearer gymdata-k:secret-token"
        assert r.said("x", key="")["content"] == "a"
        assert list(r.recorder.sessions) == ["k"]
    for root, _, files in os.walk(tmp_path):
        for file in files:
            assert b"secret-token" not in Path(root, file).read_bytes()
    with pytest.raises(UsageError, match="--token"):
        RecordConfig.of({"output": "runs/x", "host": "0.0.0.0"}, "test").checked()


def test_limits_of_bodies_and_sessions(tmp_path: Path) -> None:
    """Each is refused with the flag that raises it."""
    with recording(tmp_path / "run", "a", max_sessions=1, max_body_bytes=500) as r:
        r.said("x")
        busy = r.chat("x", key="other")
        assert (busy.status_code, "--max-sessions" in busy.text) == (429, True)
        long = r.chat("x" * 600)
        assert (long.status_code, "max_body_bytes=" in long.text) == (413, True)


@pytest.mark.parametrize(
    ("content", "got"),
    [(b"{", "not JSON"), (b"", "not JSON"), (b'"\xff"', "not JSON"), (b"[]", "list"), (b"null", "NoneType"),
     (b'{"messages": ' + b"[" * 101 + b"]" * 101 + b"}", "max_depth")],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_400_in_the_words_of_each_dialect(
    tmp_path: Path, content: bytes, got: str
) -> None:
    """On every path that takes a body."""
    headers = {"content-type": "application/json"}
    with recording(tmp_path / "run", "a") as r:
        for path in [path for entry in DIALECTS for path in (*entry.object().paths, *entry.object().count_paths)]:
            answer = r.client.post(path, content=content, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), path
            assert got in error["message"]
            assert (answer.json().get("type") == "error") == path.startswith("/v1/messages")
        r.said("x")
        # In chunks: a finish without any body is a plain ending.
        answer = r.client.post("/rollouts/k/finish", content=iter([content]), headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid")
        assert "k" in r.recorder.sessions


def test_the_turns_of_a_session_are_answered_as_they_are_stored(tmp_path: Path) -> None:
    """While it is open and after its end."""
    with recording(tmp_path / "run", "3", "4") as r:
        first = r.said("x")
        (open_turn,) = r.client.get("/rollouts/k?turns=true").json()["turns"]
        r.said("x", first, "y")
        r.finish()
        ended = r.client.get("/rollouts/k?turns=true").json()
        assert r.client.get("/rollouts/k").json()["turns"] == 2
    row = r.row()
    assert ended["turns"] == row["turns"]
    assert [turn["generation_token_ids"] for turn in ended["turns"]] == [list(g.token_ids) for g in r.sampler.sampled]
    assert open_turn | {"agent": "main"} == row["turns"][0]


def test_requests_that_begin_a_session_together_are_of_one_session(tmp_path: Path) -> None:
    """Both are turns of its rollout, although each was read before the other was sampled."""
    with recording(tmp_path / "run", "1", "2") as r:
        chat = DIALECTS["chat"].object()
        requests = [chat.read({"messages": [{"role": "user", "content": text}]}, {}) for text in ("x", "y")]

        async def together() -> None:
            sessions = [r.recorder.session_for("k", request) for request in requests]
            await asyncio.gather(*map(r.recorder.complete, sessions, requests, [Client(), Client()]))

        asyncio.run(together())
        r.finish()
    assert [turn["generation_token_ids"][0] for turn in r.row()["turns"]] == [ord("1"), ord("2")]


def test_sessions_that_end_together_are_members_of_one_group(tmp_path: Path) -> None:
    """Each with a number of its own while the others are scored; another task under the id is refused then, too."""
    task = {"task_id": "t", "prompt": "x", "answer": "4"}
    keys, reward = ("one", "two", "other"), tmp_path / "reward.py"
    reward.write_text("def right(completion, answer) -> float:\n    return float(completion == answer)\n")
    with recording(tmp_path / "run", "4", "5", "6", rewards=[f"{reward}:right"]) as r:
        for key in keys:
            r.said("x", key=key)

        async def together() -> list[Any]:
            endings = [Ending(task=task), Ending(task=task), Ending(task={**task, "answer": "5"})]
            return await asyncio.gather(*map(r.recorder.finish, keys, endings), return_exceptions=True)

        *_, refused = asyncio.run(together())
        assert isinstance(refused, RequestError)
        assert (refused.status, refused.where) == (409, "task")
        r.finish("other", task_id="t")
    rows = r.rows()
    assert len({row["group_id"] for row in rows}) == 1
    assert sorted(row["rollout_index"] for row in rows) == [0, 1, 2]
    # The last message is scored with the task that the client gave; without one, nothing is there to score it by.
    assert {row["messages"][-1]["content"]: row["reward"] for row in rows} == {"4": 1.0, "5": 0.0, "6": None}


def test_one_task_id_is_one_task(tmp_path: Path) -> None:
    """Another row under it is refused, also after a restart; without a row the rollout is of that task's group."""
    task = {"task_id": "t", "prompt": "x"}
    with recording(tmp_path / "run", "a") as r:
        r.said("x", key="one")
        r.finish("one", reward=1.0, task=task)
    with recording(tmp_path / "run", "a", "b") as r:
        for key, text in (("two", "y"), ("three", "z")):
            r.said(text, key=key)
        refused = r.end("two", reward=1.0, task={"task_id": "t", "prompt": "y"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "task")
        assert "task t was another one" in refused.json()["error"]["message"]
        r.finish("two", reward=1.0, task=task)
        r.finish("three", reward=1.0, task_id="t")
    rows = r.rows()
    assert len({row["group_id"] for row in rows}) == 1
    assert sorted(row["rollout_index"] for row in rows) == [0, 1, 2]


def test_experience_says_that_a_task_was_recorded_with_several_prompts(tmp_path: Path) -> None:
    """A client gave their rollouts one task_id, so their advantages are those of a group; a task of its own says nothing."""
    run = tmp_path / "run"
    with recording(run, *"abcd") as r:
        for key, text, task in (("one", "x", "t"), ("two", "y", "t"), ("three", "x", "u"), ("four", "x", "u")):
            r.said(text, key=key)
            r.finish(key, reward=float(key in ("two", "four")), task_id=task)
    (note,) = gymdata.experience(run, estimator="grpo").notes
    assert note.startswith("1 recorded task (t): rollouts began with different prompts")
    assert gymdata.experience(run, tmp_path / "alone", estimator="reinforce").notes == []


@pytest.mark.parametrize("ticks", range(0, 24, 3))
def test_a_call_that_comes_while_its_session_ends_does_not_bring_it_back(tmp_path: Path, ticks: int) -> None:
    """Whichever is first, by turns of the event loop: the rollout is one row, and the call is in it or was refused."""
    with recording(tmp_path / "run", "a", "b") as r:
        r.said("x", key="one")

        async def both() -> int:
            async def finish() -> None:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                await r.recorder.finish("one", Ending())

            async with r.http() as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "y"}]}
                answer, _ = await asyncio.gather(client.post("/s/one/v1/chat/completions", json=body), finish())
                return int(answer.status_code)

        status = asyncio.run(both())
        assert list(r.recorder.sessions) == []
    assert r.row()["n_turns"] == {200: 2, 409: 1}[status]


def test_the_summary_says_how_many_rollouts_are_scored() -> None:
    """Where some are not, beside the mean of those that are; and how many calls did not parse."""
    reward = {"n": 1, "mean": 1.0, "ci95": None}
    summary = RecordSummary("runs/x", "r", 3, 3, 0, 3, 9, reward, 3, 0, 0, None, interrupted=False, seconds=1.0)
    assert ("reward", "1.000 (1 of 3 rollouts scored)") in summary.rows()
    assert ("reward", "1.000") in replace(summary, reward={**reward, "n": 3}).rows()
    unparsed = ("unparsed tool calls", "2: they are text; see --tool-parser")
    assert [unparsed in replace(summary, unparsed_calls=n).rows() for n in (0, 2)] == [False, True]
