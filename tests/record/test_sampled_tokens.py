"""What an agent says in each dialect is recorded as it was read and sampled, in front of an engine whose every sample is
known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from tests.record.probe import ADD, CONVERSATIONS, Probe, Served, as_float32, case, serving, system, user

pytestmark = pytest.mark.tokenizer

QUESTION, ANSWER = user("How much is 1234+8?"), "It is 1242, which is 1234 and 8."
CALL: Any = {"name": "add", "arguments": {"a": 12, "b": 3056}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What the recorder wrote is clean at the end."""
    run = tmp_path_factory.mktemp("sampled") / "run"
    with serving(run) as recorder:
        yield recorder
    assert validate(run).ok


@case(*CONVERSATIONS)
async def test_an_answer(probe: Probe) -> None:
    """The client gets the text that was sampled, and the counts of its tokens."""
    probe.say(ANSWER)
    reply = await probe.ask([QUESTION])
    assert reply.content == ANSWER
    (draw,) = probe.draws
    probe.expect_read(draw, QUESTION["content"])
    expected = len(draw.prompt), len(draw.ids)
    assert reply.usage == expected
    assert reply.finish == "stop"


@case(*CONVERSATIONS)
async def test_a_streamed_answer(probe: Probe) -> None:
    """The parts of a stream are the text that was sampled."""
    probe.say(ANSWER)
    reply = await probe.ask([QUESTION], stream=True)
    assert reply.content == ANSWER
    assert reply.finish == "stop"


@case(*CONVERSATIONS)
async def test_a_second_turn_continues_the_ids(probe: Probe) -> None:
    """The prompt begins with all that was read and sampled, whatever the tokenizer would make of its text."""
    probe.say(ANSWER, "Yes.", "Quite.")
    messages = [system("Be brief."), QUESTION]
    for number, more in enumerate(("Are you sure?", "Really?")):
        reply = await probe.ask(messages)
        messages = [*messages, reply.message(), user(more)]
        if number:
            probe.expect_continues(probe.draws[1], probe.draws[0])
    await probe.ask(messages, stream=True)
    rest = probe.expect_continues(probe.draws[2], probe.draws[1])
    assert "Really?" in rest


@case(*CONVERSATIONS)
async def test_a_tool_call_sent_back_in_another_form(probe: Probe) -> None:
    """The tool reaches the model, its call the client; arguments serialized again and another id are the same message."""
    await _tool(probe, stream=False)


@case(*CONVERSATIONS)
async def test_a_streamed_tool_call(probe: Probe) -> None:
    """The same in a stream."""
    await _tool(probe, stream=True)


async def _tool(probe: Probe, *, stream: bool) -> None:
    call = {"id": "call1", "type": "function", "function": CALL}
    probe.say_message(tool_calls=[call])
    probe.say("The sum is 3068.")
    reply = await probe.ask([QUESTION], [ADD], stream=stream)
    probe.expect_read(probe.draws[0], ADD["name"], *ADD["parameters"]["properties"])
    calls = [(name, arguments) for _, name, arguments in reply.calls]
    assert calls == [(CALL["name"], CALL["arguments"])]
    assert reply.finish == "calls"
    renamed = [{"id": "renamed_1", "name": CALL["name"], "arguments": CALL["arguments"]}]
    sent = reply.message() | {"calls": renamed}
    result = {"role": "tool", "call_id": "renamed_1", "content": "3068"}
    assert (await probe.ask([QUESTION, sent, result], [ADD], stream=stream)).content == "The sum is 3068."
    rest = probe.expect_continues(probe.draws[1], probe.draws[0])
    assert "3068" in rest


@case(*CONVERSATIONS)
async def test_two_tool_calls_at_once(probe: Probe) -> None:
    """Both are given to the client, and both results come after the held ids."""
    second = {"name": "add", "arguments": {"a": 5, "b": 6}}
    calls = [{"id": f"call{k}", "type": "function", "function": c} for k, c in enumerate((CALL, second))]
    probe.say_message(tool_calls=calls)
    probe.say("Done.")
    reply = await probe.ask([QUESTION], [ADD])
    assert len(reply.calls) == 2
    results = [{"role": "tool", "call_id": id_, "content": f"result-{k}"} for k, (id_, *_) in enumerate(reply.calls)]
    await probe.ask([QUESTION, reply.message(), *results], [ADD])
    rest = probe.expect_continues(probe.draws[1], probe.draws[0])
    assert "result-0" in rest
    assert "result-1" in rest


@case(*CONVERSATIONS)
async def test_reasoning_that_the_client_leaves_out(probe: Probe) -> None:
    """The held ids, with the reasoning, are continued."""
    probe.say_message(content="It is 1242.", reasoning="1234 and 8 are 1242")
    probe.say("Yes.")
    reply = await probe.ask([QUESTION])
    await probe.ask([QUESTION, reply.message(), user("Sure?")])
    probe.expect_continues(probe.draws[1], probe.draws[0])


@case(*CONVERSATIONS)
async def test_content_as_parts(probe: Probe) -> None:
    """Text and a list of one text are the same message."""
    probe.say(ANSWER, "Yes.")
    reply = await probe.ask([QUESTION])
    await probe.ask([QUESTION, reply.message(), user("Sure?")], as_parts=True)
    rest = probe.expect_continues(probe.draws[1], probe.draws[0])
    assert "Sure?" in rest


@case(*CONVERSATIONS)
async def test_an_edited_message_begins_a_branch(probe: Probe) -> None:
    """What the client rewrote is what the model reads, as a conversation with a label of its own."""
    probe.say(ANSWER, "Yes.", "No.")
    reply = await probe.ask([QUESTION])
    await probe.ask([QUESTION, reply.message(), user("Sure?")])
    edited = user("How much is 77+1?")
    await probe.ask([edited, reply.message(), user("Sure?")])
    probe.expect_read(probe.draws[2], edited["content"], never=[QUESTION["content"]])
    agents = [recorded.agent for recorded in await probe.finish()]
    assert len(agents) > 2
    is_new = agents[2] is not None and agents[2] not in agents[:2]
    assert is_new


@case(*CONVERSATIONS)
async def test_a_request_that_is_wrong(probe: Probe) -> None:
    """It is refused in the dialect's form, and is no turn."""
    status = await probe.refused([QUESTION], temperature="warm")
    assert 400 <= status < 500
    status, *_ = await probe.send("POST", f"/s/{probe.key}{probe.wire.path}", '{"model": "scripted", ')
    assert 400 <= status < 500
    assert not probe.draws


@case(*CONVERSATIONS)
async def test_an_engine_that_fails(probe: Probe) -> None:
    """The client gets an error in the dialect's form, and nothing is recorded; the next try is one turn."""
    for stream in (False, True):
        probe.engine.failing = 500
        status = await probe.refused([QUESTION], stream=stream)
        assert status >= 500 or status == 429
        assert not await probe.turns()
    probe.engine.failing = None
    probe.say(ANSWER)
    assert (await probe.ask([QUESTION])).content == ANSWER


@case(*CONVERSATIONS)
async def test_max_tokens_cuts(probe: Probe) -> None:
    """The reply says so, and the turn ends without a stop token."""
    probe.say("one two three four five six", respell=False)
    reply = await probe.ask([QUESTION], max_tokens=3)
    assert reply.finish == "length"
    (draw,) = probe.draws
    assert len(draw.ids) == 3
    assert reply.content == probe.text_of(draw.ids)


@case(*CONVERSATIONS)
async def test_a_prompt_that_is_too_long(probe: Probe) -> None:
    """It is refused in the dialect's form, and is no turn."""
    status = await probe.refused([user("7 " * 4000)])
    assert 400 <= status < 500


@case("chat")
async def test_log_probabilities_that_a_client_asks_for(probe: Probe) -> None:
    """They are the engine's."""
    probe.say(ANSWER)
    status, body, answer = await probe.post([QUESTION], logprobs=True)
    assert status == 200, answer
    log_probs = [as_float32(entry["logprob"]) for entry in body["choices"][0]["logprobs"]["content"]]
    assert log_probs == [as_float32(value) for value in probe.draws[0].log_probs]


@case("chat")
async def test_several_choices(probe: Probe) -> None:
    """They are refused by name, and nothing is sampled."""
    status, body, answer = await probe.post([QUESTION], n=2)
    assert (status, body["error"]["param"]) == (400, "n"), answer
    assert not probe.draws


@case("chat", "messages")
async def test_a_text_that_stops(probe: Probe) -> None:
    """The stop text is not in the reply, and all that was sampled is in the turn."""
    probe.say("one two halt three", respell=False)
    stop: Any = {"stop_sequences" if probe.wire.name == "messages" else "stop": ["halt"]}
    reply = await probe.ask([QUESTION], **stop)
    assert reply.content == "one two "
    assert reply.finish == "stop"
