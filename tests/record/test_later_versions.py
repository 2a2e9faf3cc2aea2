"""What becomes of a conversation that its client compacts, edits or gives another system prompt: a later version of main,
and never a sub-agent's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.record.messages import digest_of
from gymdata.commands.show.conversations import conversations_of
from gymdata.errors import DataError
from gymdata.rewards.remote import RemoteReward
from gymdata.rewards.views import saved_view
from tests.collect.fake_parts import END
from tests.record.scripted_engine import Recording, recording


def tools(dialect: str, *names: str) -> list[dict[str, Any]]:
    """Definitions of tools without parameters."""
    kind, schema = {"type": "function"}, {"type": "object"}
    if dialect == "messages":
        return [{"name": name, "input_schema": schema} for name in names]
    if dialect == "responses":
        return [{**kind, "name": name, "parameters": schema} for name in names]
    return [{**kind, "function": {"name": name, "parameters": schema}} for name in names]


def ask(r: Recording, dialect: str, texts: Sequence[str], *names: str, system: str | None = None) -> str:
    """The answer to texts of user and assistant in turn."""
    path = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}[dialect]
    said = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    body: dict[str, Any] = {"model": "m", "tools": tools(dialect, *names)} if names else {"model": "m"}
    if dialect == "chat":
        first = [{"role": "system", "content": system}] if system else []
        answer = r.client.post(f"/s/k/v1/{path}", json=body | {"messages": [*first, *said]})
        return str(answer.json()["choices"][0]["message"]["content"])
    if dialect == "messages":
        body |= {"messages": said, "max_tokens": 50} | ({"system": system} if system else {})
        return str(r.client.post(f"/s/k/v1/{path}", json=body).json()["content"][0]["text"])
    body |= {"input": said} | ({"instructions": system} if system else {})
    return str(r.client.post(f"/s/k/v1/{path}", json=body).json()["output"][0]["content"][0]["text"])


@pytest.fixture(params=["chat", "messages", "responses"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def versions(row: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(one["agent"], one.get("cause")) for one in json.loads(row["extra"])["conversations"]]


def contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_an_edited_first_answer_goes_on_as_main_2(dialect: str, tmp_path: Path) -> None:
    """The row's messages, its task's prompt and what rewards read are right, and extra says what was changed and how long
    main is."""
    reward = tmp_path / "rw.py"
    reward.write_text(
        "def seen(completion) -> float:\n    return float(sum(m['role'] == 'assistant' for m in completion))\n"
    )
    with recording(tmp_path / "run", *"abcd", rewards=[f"{reward}:seen"]) as r:
        ask(r, dialect, ["x"], "add")
        said = ["x", "short", "y"]
        for more in ("z", "w"):
            said += [ask(r, dialect, said, "add"), more]
        ask(r, dialect, said, "add")
        r.finish()
    row = r.row()
    assert versions(row) == [("main", None), ("main.2", "message 1 (assistant) changed")]
    assert [turn["agent"] for turn in row["turns"]] == ["main", "main.2", "main.2", "main.2"]
    assert contents(row) == ["x", "short", "y", "b", "z", "c", "w", "d"]
    assert (row["reward"], row["n_breaks"], json.loads(row["task"])["prompt"]) == (3.0, 0, "x")
    main = {"versions": 2, "turns": 4, "turns_shown": 3, "causes": ["message 1 (assistant) changed"]}
    assert json.loads(row["extra"])["main"] == main


EDITED = ["x", "a", "y", "short", "z"]


def test_an_edited_later_answer_goes_on_as_main_2_after_the_ids_before_it(dialect: str, tmp_path: Path) -> None:
    """A retry and what goes on are of that version, an edit of it is the next; rewards read all of the conversation."""
    reward = tmp_path / "rw.py"
    reward.write_text(
        "def seen(completion) -> float:\n    return float(sum(m['role'] == 'assistant' for m in completion))\n"
    )
    with recording(tmp_path / "run", *"abcdef", rewards=[f"{reward}:seen"]) as r:
        for texts in (["x"], ["x", "a", "y"], EDITED, EDITED, [*EDITED, "d", "w"], [*EDITED, "D", "w"]):
            ask(r, dialect, texts, "add")
        assert r.prompts()[2].startswith(f"{r.prompts()[0]}a")
        r.finish()
    row, causes = r.row(), ["message 3 (assistant) changed", "message 5 (assistant) changed"]
    assert versions(row) == [("main", None), ("main.2", causes[0]), ("main.3", causes[1])]
    assert [turn["agent"] for turn in row["turns"]] == ["main"] * 2 + ["main.2"] * 3 + ["main.3"]
    assert contents(row) == ["x", "a", "y", "short", "z", "D", "w", "f"]
    assert (row["reward"], row["n_breaks"]) == (4.0, 0)
    main = {"versions": 3, "turns": 6, "turns_shown": 2, "causes": causes}
    assert json.loads(row["extra"])["main"] == main
    view = saved_view(row)
    assert not isinstance(view, DataError)
    server = RemoteReward("http://127.0.0.1:9", decode=lambda ids: "".join(chr(i) if i < 256 else "/" for i in ids))
    assert server.texts(view) == (f"{r.prompts()[-1]}f/", r.prompts()[0])


def test_a_result_that_was_trimmed_is_an_edit_and_a_message_put_in_is_none(tmp_path: Path) -> None:
    """What is given for the first time changes nothing that was recorded."""
    with recording(tmp_path / "run", "CALL add {}", "b", "c", "d") as r:
        first = r.said("x", tools=tools("chat", "add"))
        said: list[Any] = [
            "x",
            first,
            {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "long"},
        ]
        said += [{"role": "assistant", "content": r.said(*said, tools=tools("chat", "add"))["content"]}]
        said += [{"role": "assistant", "content": "a note"}, "y"]
        last = r.said(*said, tools=tools("chat", "add"))
        r.said(*said[:2], {**said[2], "content": "..."}, *said[3:], last, "z", tools=tools("chat", "add"))
        r.finish()
    assert versions(r.row()) == [("main", None), ("main.2", "message 2 (tool) changed")]
    assert [turn["agent"] for turn in r.row()["turns"]] == ["main"] * 3 + ["main.2"]
    assert [view.begins for view in conversations_of(r.row())] == [
        "begins at turn 0", "branches after turn 0: message 2 (tool) changed",
    ]  # fmt: skip


def test_other_reasoning_is_the_cause_of_a_version(tmp_path: Path) -> None:
    """And not the message after it."""
    with recording(tmp_path / "run", "THINK hm|a", "b") as r:
        first = r.said("x")
        r.said("x", first | {"reasoning_content": "no"}, "y")
        r.finish()
    assert versions(r.row()) == [("main", None), ("main.2", "message 1 (assistant) changed")]


@pytest.mark.parametrize("system", [None, "agent"])
def test_compacted_history_goes_on_as_main_2_and_main_3(dialect: str, system: str | None, tmp_path: Path) -> None:
    """Although no message of it is repeated."""
    with recording(tmp_path / "run", *"abcde") as r:
        ask(r, dialect, ["x"], "add", system=system)
        first = ask(r, dialect, ["Summary: a"], "add", system=system)
        ask(r, dialect, ["Summary: a", first, "y"], "add", system=system)
        ask(r, dialect, ["Summary: abc"], "add", system=system)
        r.finish(task_id="t")
    row = r.row()
    cause = "no earlier message is sent"
    assert versions(row) == [("main", None), ("main.2", cause), ("main.3", cause)]
    assert contents(row)[-2:] == ["Summary: abc", "d"]
    assert json.loads(row["extra"])["main"]["turns"] == 4


@pytest.mark.parametrize("texts", [["Summary: a"], ["x", "a", "y"]], ids=["compacted", "repeated"])
def test_a_new_system_prompt_goes_on_as_main_2(dialect: str, texts: list[str], tmp_path: Path) -> None:
    """Whether the history is sent with it or compacted."""
    with recording(tmp_path / "run", *"abc") as r:
        ask(r, dialect, ["x"], "add", system="old")
        last = ask(r, dialect, texts, "add", system="new")
        ask(r, dialect, [*texts, last, "z"], "add", system="new")
        r.finish()
    row = r.row()
    ((first, none), (second, cause)) = versions(row)
    assert (first, none, second) == ("main", None, "main.2")
    assert cause is not None
    assert cause.startswith("the system prompt changed")
    assert contents(row) == ["new", *texts, "b", "z", "c"]


def test_a_conversation_without_tools_is_compacted_once_it_has_two_turns(tmp_path: Path) -> None:
    """Calls without tools and system prompt that repeat nothing have no other sign that one agent makes them."""
    with recording(tmp_path / "run", *"abcde") as r:
        ask(r, "chat", ["x"])
        ask(r, "chat", ["another"])
        ask(r, "chat", ["x", "a", "y"])
        ask(r, "chat", ["Summary"])
        r.finish()
    one, other, last = (agent for agent, _ in versions(r.row()))
    assert (one, other[:5], last) == ("main", "side-", "main.2")
    assert contents(r.row()) == ["Summary", "d"]


@pytest.mark.parametrize("system", ["old", "new"])
def test_a_sub_agent_that_main_waits_for_is_a_side_conversation(dialect: str, system: str, tmp_path: Path) -> None:
    """Even with the tools, or also the system prompt, of main, which is continued after it began; so is one after it."""
    with recording(tmp_path / "run", *"abcde") as r:
        ask(r, dialect, ["x"], "add", system="old")
        sub = ask(r, dialect, ["find"], "add", system=system)
        ask(r, dialect, ["find", sub, "more"], "add", system=system)
        ask(r, dialect, ["x", "a", "y"], "add", system="old")
        ask(r, dialect, ["title"], "other", system="Title")
        r.finish()
    row = r.row()
    (main, _), (side, none), (title, no) = versions(row)
    assert (main, side[:5], title[:5], none, no) == ("main", "side-", "side-", None, None)
    assert contents(row) == ["old", "x", "a", "y", "d"]
    assert "main" not in json.loads(row["extra"])


def test_another_system_prompt_while_main_waits_for_a_call_is_undecided(tmp_path: Path) -> None:
    """It may be a sub-agent that never returned, or a later version: extra says so, and main stays what it was."""
    with recording(tmp_path / "run", "CALL add {}", "b") as r:
        r.said("x", tools=tools("chat", "add"))
        ask(r, "chat", ["find"], "add", system="new")
        r.finish()
    row = r.row()
    (_, (side, cause)) = versions(row)
    assert (side[:5], str(cause)[:9]) == ("side-", "undecided")
    assert [turn["agent"] for turn in row["turns"]] == ["main", side]


def test_sub_agents_of_one_kind_are_no_versions_of_each_other(tmp_path: Path) -> None:
    """One after the other, with a system prompt of their own and main's tools."""
    with recording(tmp_path / "run", *"abcde") as r:
        ask(r, "chat", ["x"], "add", system="main")
        ask(r, "chat", ["find"], "add", system="sub")
        ask(r, "chat", ["find more"], "add", system="sub")
        ask(r, "chat", ["x", "a", "y"], "add", system="main")
        r.finish()
    one, two, three = (agent for agent, _ in versions(r.row()))
    assert (one, three) == ("main", f"{two}-2")


def test_a_restarted_recorder_knows_the_versions(tmp_path: Path) -> None:
    """Each is journaled with its cause."""
    with recording(tmp_path / "run", "a", "b") as r:
        ask(r, "chat", ["x"], "add")
        ask(r, "chat", ["Summary"], "add")
    with recording(tmp_path / "run", "c") as r:
        ask(r, "chat", ["Summary", "b", "y"], "add")
        r.finish()
    assert [turn["agent"] for turn in r.row()["turns"]] == ["main", "main.2", "main.2"]


JAVASCRIPT = [("12.0", "12"), ("1e3", "1000"), ("-0.0", "0"), ("[1.0, {\"b\": 2.50}]", "[1,{\"b\":2.5}]"),
              ("12345678901234567890", "12345678901234567000"), ("1e21", "1e+21")]  # fmt: skip


@pytest.mark.parametrize(("sampled", "sent"), JAVASCRIPT, ids=[sampled for sampled, _ in JAVASCRIPT])
def test_numbers_that_javascript_rewrites_are_equal(dialect: str, sampled: str, sent: str, tmp_path: Path) -> None:
    """JSON.parse and stringify of a call change no value, so the held ids continue."""
    path = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}[dialect]
    text, again = f'CALL add {{"a": {sampled}}}', f'{{"a":{sent}}}'
    body: dict[str, Any] = {"model": "m", "tools": tools(dialect, "add"), "max_tokens": 50}
    if dialect == "chat":
        call = {"id": "q", "type": "function", "function": {"name": "add", "arguments": again}}
        body["messages"] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        body["messages"].append({"role": "tool", "tool_call_id": "q", "content": "3"})
    elif dialect == "messages":
        use = f'{{"type": "tool_use", "id": "q", "name": "add", "input": {again}}}'
        result = {"type": "tool_result", "tool_use_id": "q", "content": "3"}
        body["messages"] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ["USE"]}]
        body["messages"].append({"role": "user", "content": [result]})
    else:
        del body["max_tokens"]
        body["input"] = [{"role": "user", "content": "x"},
                         {"type": "function_call", "call_id": "q", "name": "add", "arguments": again},
                         {"type": "function_call_output", "call_id": "q", "output": "3"}]  # fmt: skip
    content = json.dumps(body).replace('"USE"', use if dialect == "messages" else "")
    with recording(tmp_path / "run", text, "b") as r:
        r.said("x", tools=tools("chat", "add"), key="k")
        answer = r.client.post(f"/s/k/v1/{path}", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert r.prompts()[1] == f"//x//{text}//3//"
        r.finish()
    assert {turn["agent"] for turn in r.row()["turns"]} == {"main"}


def test_a_number_beyond_64_bits_is_compared_too() -> None:
    """No row can hold it, so its call stays text, and comes back as a number that one can."""
    number, text = ({"role": "assistant", "tool_calls": [{"id": "q", "function": {"name": "add", "arguments": arguments}}]}
                    for arguments in ({"a": 1e23}, '{"a": 99999999999999999999999}'))  # fmt: skip
    assert digest_of(number) == digest_of(text)


@pytest.mark.parametrize(("sampled", "sent"), [("12.5", "12"), ("1", '"1"'), ("1", "true"), ("0", "null")])
def test_other_values_of_arguments_are_an_edit(sampled: str, sent: str, tmp_path: Path) -> None:
    """Texts, truth values and null are no numbers."""
    with recording(tmp_path / "run", f'CALL add {{"a": {sampled}}}', "b") as r:
        r.said("x", tools=tools("chat", "add"))
        call = {"id": "q", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {sent}}}'}}
        result = {"role": "tool", "tool_call_id": "q", "content": "3"}
        r.said("x", {"role": "assistant", "tool_calls": [call]}, result, tools=tools("chat", "add"))
        r.finish()
    assert versions(r.row()) == [("main", None), ("main.2", "message 1 (assistant) changed")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([{"role": "user", "content": "hi", "name": "alice"}], [{"role": "user", "content": "hi", "name": "bob"}]),
        ([{"role": "user", "content": "hi", "name": "alice"}], [{"role": "user", "content": "hi"}]),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "name": "alice"}],
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "name": "bob"}],
        ),
    ],
    ids=["of a user", "left out", "of an assistant that was not sampled"],
)
def test_another_name_is_an_edit(before: list[Any], after: list[Any], tmp_path: Path) -> None:
    """No prompt is spliced that the client did not send: neither the same one again, nor a continued one."""
    before, after = ([*messages, {"role": "user", "content": "x"}] for messages in (before, after))
    with recording(tmp_path / "run", *"123") as r:
        r.said(*before)
        second = r.said(*after)
        r.said(*after, second, "y")
        assert [step.parent for step in r.recorder.sessions["k"].steps] == [-1, -1, 1]
        r.finish()
    assert [turn["agent"] for turn in r.row()["turns"]] == ["main", "main.2", "main.2"]


def test_a_name_on_what_the_model_wrote_or_a_call_has_is_no_edit(tmp_path: Path) -> None:
    """The client's own name for the agent, and the tool's on its result."""
    with recording(tmp_path / "run", "CALL add {}", "b", "c") as r:
        first = r.said("x", tools=tools("chat", "add"))
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
        r.said("x", {**first, "name": "coder"}, {**result, "name": "add"}, tools=tools("chat", "add"))
        second = {"role": "assistant", "content": "b"}
        r.said("x", first, result, second, "y", tools=tools("chat", "add"))
        r.finish()
    assert {turn["agent"] for turn in r.row()["turns"]} == {"main"}
    assert r.row()["n_turns"] == 3


def test_target_agents_main_trains_every_version_of_main(tmp_path: Path) -> None:
    """And no side conversation."""
    with recording(tmp_path / "run", *"abc") as r:
        ask(r, "chat", ["x"], "add")
        ask(r, "chat", ["title"], "other", system="Title")
        ask(r, "chat", ["Summary"], "add")
        r.finish(reward=1.0)
    settings = {"estimator": "reinforce", "target_agents": "main", "zero_variance": "keep"}
    gymdata.experience(tmp_path / "run", tmp_path / "experience", **settings)
    rows = gymdata.query("SELECT input_ids, loss_mask FROM experiences", tmp_path / "experience").to_pylist()
    trained = [[i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] for row in rows]
    assert sorted(ids for ids in trained if ids) == [[ord("a"), END], [ord("c"), END]]
