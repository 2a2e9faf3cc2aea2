"""Which ids a request continues, and when a client's version of a message is the recorded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.errors import DataError
from gymdata.rewards.remote import RemoteReward
from gymdata.rewards.views import saved_view
from gymdata.rollouts.turns import kinds
from tests.collect.fake_parts import END, ROLE
from tests.record.scripted_engine import recording

USER, ASSISTANT, TOOL = ROLE["user"], ROLE["assistant"], ROLE["tool"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
OTHER = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]


def test_the_second_prompt_is_the_ids_read_and_sampled_and_what_is_new(tmp_path: Path) -> None:
    """With literal ids: nothing that was sampled is rendered again."""
    with recording(tmp_path / "run", "a", "b") as r:
        first = r.said("x")
        assert first["content"] == "a"
        r.said("x", first, "y")
        assert r.sampler.requests[1].prompt_token_ids == [
            *(USER, ord("x"), END, ASSISTANT, ord("a"), END),
            *(USER, ord("y"), END, ASSISTANT),
        ]
        assert r.finish(reward=1.0)["turns"] == 2
    row = r.row()
    assert [turn["generation_token_ids"] for turn in row["turns"]] == [[ord("a"), END], [ord("b"), END]]
    assert [turn["prefix_length"] for turn in row["turns"]] == [0, 6]
    assert (row["status"], row["reward"], row["n_breaks"]) == ("completed", 1.0, 0)
    assert [m["turn"] for m in row["messages"]] == [None, 0, None, 1]
    assert validate(tmp_path / "run").violations == []


def test_a_call_that_no_row_could_hold_is_kept_as_its_text(tmp_path: Path) -> None:
    """Of a conversation that the client wrote itself: its arguments stay as they were sent."""
    arguments = '{"a": 99999999999999999999999}'
    call = {"id": "q", "type": "function", "function": {"name": "add", "arguments": arguments}}
    with recording(tmp_path / "run", "3", "4") as r:
        before = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "q", "content": "1"}]
        first = r.said("x", *before, tools=TOOLS)
        r.said("x", *before, first, "y", tools=TOOLS)
        assert r.finish()["turns"] == 2
    row = r.row()
    (stored,) = json.loads(row["messages"][1]["tool_calls"])
    assert (stored["function"]["arguments"], row["n_breaks"]) == (arguments, 0)
    assert [turn["prefix_length"] > 0 for turn in row["turns"]] == [False, True]


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ("a  b\n", {"content": "a b"}),
        ("a", {"content": " a\n"}),
        ("a", {"content": [{"type": "text", "text": "a"}]}),
        ("THINK hm|a", {"content": "a"}),
        ("THINK hm|a", {"content": "a", "reasoning_content": "hm"}),
    ],
    ids=["white space inside", "white space at the ends", "as parts", "missing reasoning", "reasoning sent back"],
)
def test_a_message_in_other_words_is_the_same(tmp_path: Path, said: str, sent: dict[str, Any]) -> None:
    """The held ids continue, and the second prompt has the sampled text as it was sampled."""
    with recording(tmp_path / "run", said, "b") as r:
        r.said("x")
        r.said("x", {"role": "assistant", **sent}, "y")
        assert r.prompts()[1] == f"/x//{said}//y//"
        assert len(r.recorder.sessions["k"].threads) == 1


def test_calls_with_other_ids_and_arguments_written_anew_are_the_same(tmp_path: Path) -> None:
    """The result is stored with the id that the recorder gave, and no key order or white space of arguments counts."""
    with recording(tmp_path / "run", 'CALL add {"a": 1, "b": 2}', "3") as r:
        call = r.said("x", tools=TOOLS)["tool_calls"][0]
        again = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        result = {"role": "tool", "tool_call_id": "mine", "content": "3"}
        r.said("x", {"role": "assistant", "content": "", "tool_calls": [again]}, result, tools=TOOLS)
        assert r.prompts()[1] == '//x//CALL add {"a": 1, "b": 2}//3//'
        r.finish(reward=0)
    row = r.row()
    assert row["messages"][2]["tool_call_id"] == call["id"] == json.loads(row["messages"][1]["tool_calls"])[0]["id"]
    assert validate(tmp_path / "run").violations == []


@pytest.mark.parametrize(
    ("messages", "more", "cause"),
    [
        (["z", {"role": "assistant", "content": "a"}, "y"], {}, "message 0 (user) changed"),
        (["x", {"role": "assistant", "content": "a"}, "y"], {"tools": TOOLS}, "the tools changed"),
        (
            [{"role": "system", "content": "s"}, "x", {"role": "assistant", "content": "a"}, "y"],
            {},
            "the system prompt changed",
        ),
    ],
)
def test_history_that_was_edited_begins_a_branch_with_its_cause(
    tmp_path: Path, messages: list[Any], more: dict[str, Any], cause: str
) -> None:
    """It is rendered once, is a later version of main, and is no fault."""
    with recording(tmp_path / "run", "a", "b", "c") as r:
        first = r.said("x")
        r.said("x", first, "y")
        r.said(*messages, **more)
        r.finish()
    row = r.row()
    began = json.loads(row["extra"])["conversations"]
    assert [one.get("cause") for one in began] == [None, cause]
    assert {row["turns"][k]["agent"] for k in range(3)} == {one["agent"] for one in began}
    assert kinds(row["turns"])[-1] == "branch"


def test_a_fork_of_a_conversation_continues_the_ids_before_it(tmp_path: Path) -> None:
    """Two requests that go on from the same turn are branches of one conversation."""
    with recording(tmp_path / "run", "a", "b", "c") as r:
        first = r.said("x")
        r.said("x", first, "y")
        r.said("x", first, "z")
        assert r.prompts()[1:] == ["/x//a//y//", "/x//a//z//"]
        r.finish()
    row = r.row()
    assert [turn["agent"] for turn in row["turns"]] == ["main"] * 3
    assert kinds(row["turns"]) == ["first", "continues", "branch"]


def test_the_same_request_again_is_a_retry(tmp_path: Path) -> None:
    """A client that lost an answer gets another one to the same prompt."""
    with recording(tmp_path / "run", "a", "b", "c") as r:
        r.said("x")
        again = r.said("x")
        r.said("x", again, "y")
        r.finish()
    row = r.row()
    assert kinds(row["turns"]) == ["first", "retry", "continues"]
    assert [m["content"] for m in row["messages"]] == ["x", "b", "y", "c"]


def test_the_same_request_with_other_reasoning_is_another_prompt(tmp_path: Path) -> None:
    """What the model then reads is what the client sent, in place of the reasoning that it had sampled."""
    with recording(tmp_path / "run", "THINK hm|a", "b", "c") as r:
        first = r.said("x")
        r.said("x", first, "y")
        r.said("x", first | {"reasoning_content": "no"}, "y")
        assert "hm" in r.prompts()[1]
        assert "hm" not in r.prompts()[2]
        r.finish()
    assert kinds(r.row()["turns"])[-1] == "branch"


def test_side_requests_are_conversations_of_their_own(tmp_path: Path) -> None:
    """A title comes first and a sub-agent in between; main is the first conversation with tools, and its messages are the
    row's."""
    with recording(tmp_path / "run", "title", "a", "sub", "b") as r:
        r.said({"role": "system", "content": "Give a title"}, "x")
        first = r.said("x", tools=TOOLS)
        r.said({"role": "system", "content": "You search"}, "find", tools=OTHER)
        r.said("x", first, "y", tools=TOOLS)
        r.finish()
    row = r.row()
    agents = [turn["agent"] for turn in row["turns"]]
    assert agents[1] == agents[3] == "main"
    assert agents[0].startswith("side-")
    assert agents[2].startswith("side-")
    assert len(set(agents)) == 3
    assert [m["content"] for m in row["messages"]] == ["x", "a", "y", "b"]
    assert [m["messages"][-1]["content"] for m in json.loads(row["extra"])["other_messages"]] == ["title", "sub"]


def test_a_reward_of_ids_reads_the_main_conversation(tmp_path: Path) -> None:
    """From its first prompt to its last token, whichever side conversation had the first call or the last."""
    with recording(tmp_path / "run", "title", "a", "b", "summary") as r:
        r.said({"role": "system", "content": "Give a title"}, "x")
        first = r.said("x", tools=TOOLS)
        r.said("x", first, "y", tools=TOOLS)
        r.said({"role": "system", "content": "Sum up"}, "x")
        r.finish()
    view = saved_view(r.row())
    assert not isinstance(view, DataError)
    server = RemoteReward("http://127.0.0.1:9", decode=lambda ids: "".join(chr(i) if i < 256 else "/" for i in ids))
    assert server.texts(view) == (f"{r.prompts()[2]}b/", r.prompts()[1])


def test_without_a_key_a_request_belongs_to_the_session_that_it_continues(tmp_path: Path) -> None:
    """Two attempts at one task that begin alike are two rollouts, each with its own second turn."""
    with recording(tmp_path / "run", "a", "b", "c", "d") as r:
        one, two = r.said("x", key=""), r.said("x", key="")
        r.said("x", two, "y", key="")
        r.said("x", one, "z", key="")
        sessions = list(r.recorder.sessions.values())
        assert [s.messages_of(1)[-1]["content"] for s in sessions] == ["d", "c"]
