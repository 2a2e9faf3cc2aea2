"""The cases that every dialect with messages has, and those of completions of text."""

from __future__ import annotations

from typing import Any

from gymdata.check.conformance.evidence import as_float32
from gymdata.check.conformance.probe import ADD, CONVERSATIONS, Probe, case, expect, expect_text, system, user

QUESTION, ANSWER = user("How much is 1234+8?"), "It is 1242, which is 1234 and 8."
CALL: Any = {"name": "add", "arguments": {"a": 12, "b": 3056}}


@case("an answer", *CONVERSATIONS)
async def answers(probe: Probe) -> None:
    """The client gets the text that was sampled, and the counts of its tokens."""
    probe.say(ANSWER)
    reply = await probe.ask([QUESTION])
    expect_text(reply, ANSWER)
    (draw,) = probe.draws
    probe.expect_read(draw, QUESTION["content"])
    expected = len(draw.prompt), len(draw.ids)
    expect(reply.usage == expected, f"usage: got {reply.usage} tokens of prompt and completion, expected {expected}")
    expect(reply.finish == "stop", f"the reason to end: got {reply.finish!r}, expected the dialect's word for stop")


@case("a streamed answer", *CONVERSATIONS)
async def streams(probe: Probe) -> None:
    """The parts of a stream are the text that was sampled."""
    probe.say(ANSWER)
    reply = await probe.ask([QUESTION], stream=True)
    expect_text(reply, ANSWER)
    expect(reply.finish == "stop", f"the reason to end: got {reply.finish!r}, expected the dialect's word for stop")


@case("a second turn continues the ids", *CONVERSATIONS)
async def continues(probe: Probe) -> None:
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
    expect("Really?" in rest, f"after the held ids the prompt has {rest!r:.200}, expected the new message")


@case("a tool call, sent back in another form", *CONVERSATIONS)
async def calls_a_tool(probe: Probe) -> None:
    """The tool reaches the model, its call the client; arguments serialized again and another id are the same message."""
    await _tool(probe, stream=False)


@case("a streamed tool call", *CONVERSATIONS)
async def streams_a_call(probe: Probe) -> None:
    """The same in a stream."""
    await _tool(probe, stream=True)


async def _tool(probe: Probe, *, stream: bool) -> None:
    call = {"id": "call1", "type": "function", "function": CALL}
    probe.say_message(tool_calls=[call])
    probe.say("The sum is 3068.")
    reply = await probe.ask([QUESTION], [ADD], stream=stream)
    probe.expect_read(probe.draws[0], ADD["name"], *ADD["parameters"]["properties"])
    calls = [(name, arguments) for _, name, arguments in reply.calls]
    expect(calls == [(CALL["name"], CALL["arguments"])], f"the client got the calls {calls}, sampled was {CALL}")
    expect(reply.finish == "calls", f"the reason to end: got {reply.finish!r}, expected the dialect's word for calls")
    renamed = [{"id": "renamed_1", "name": CALL["name"], "arguments": CALL["arguments"]}]
    sent = reply.message() | {"calls": renamed}
    result = {"role": "tool", "call_id": "renamed_1", "content": "3068"}
    expect_text(await probe.ask([QUESTION, sent, result], [ADD], stream=stream), "The sum is 3068.")
    rest = probe.expect_continues(probe.draws[1], probe.draws[0])
    expect("3068" in rest, f"after the held ids the prompt has {rest!r:.200}, expected the tool's result")


@case("two tool calls at once", *CONVERSATIONS)
async def calls_twice(probe: Probe) -> None:
    """Both are given to the client, and both results come after the held ids."""
    second = {"name": "add", "arguments": {"a": 5, "b": 6}}
    calls = [{"id": f"call{k}", "type": "function", "function": c} for k, c in enumerate((CALL, second))]
    probe.say_message(tool_calls=calls)
    probe.say("Done.")
    reply = await probe.ask([QUESTION], [ADD])
    expect(len(reply.calls) == 2, f"the client got {len(reply.calls)} calls, sampled were 2")
    results = [{"role": "tool", "call_id": id_, "content": f"result-{k}"} for k, (id_, *_) in enumerate(reply.calls)]
    await probe.ask([QUESTION, reply.message(), *results], [ADD])
    rest = probe.expect_continues(probe.draws[1], probe.draws[0])
    expect(
        "result-0" in rest and "result-1" in rest, f"after the held ids the prompt has {rest!r:.200}: a result lacks"
    )


@case("reasoning that the client leaves out", *CONVERSATIONS)
async def drops_reasoning(probe: Probe) -> str | None:
    """The held ids, with the reasoning, are continued."""
    probe.say_message(content="It is 1242.", reasoning="1234 and 8 are 1242")
    probe.say("Yes.")
    reply = await probe.ask([QUESTION])
    await probe.ask([QUESTION, reply.message(), user("Sure?")])
    probe.expect_continues(probe.draws[1], probe.draws[0])
    return None if reply.reasoning else "the recorder gives reasoning as part of the text"


@case("content as parts", *CONVERSATIONS)
async def sends_parts(probe: Probe) -> None:
    """Text and a list of one text are the same message."""
    probe.say(ANSWER, "Yes.")
    reply = await probe.ask([QUESTION])
    await probe.ask([QUESTION, reply.message(), user("Sure?")], as_parts=True)
    rest = probe.expect_continues(probe.draws[1], probe.draws[0])
    expect("Sure?" in rest, f"after the held ids the prompt has {rest!r:.200}, expected the new message")


@case("an edited message begins a branch", *CONVERSATIONS)
async def edits_history(probe: Probe) -> None:
    """What the client rewrote is what the model reads, as a conversation with a label of its own."""
    probe.say(ANSWER, "Yes.", "No.")
    reply = await probe.ask([QUESTION])
    await probe.ask([QUESTION, reply.message(), user("Sure?")])
    edited = user("How much is 77+1?")
    await probe.ask([edited, reply.message(), user("Sure?")])
    probe.expect_read(probe.draws[2], edited["content"], never=[QUESTION["content"]])
    agents = [recorded.agent for recorded in await probe.finish()]
    expect(len(agents) > 2, f"{len(agents)} turns are recorded, expected 3")
    is_new = agents[2] is not None and agents[2] not in agents[:2]
    expect(is_new, f"the branch has no agent label of its own: the labels are {agents}")


@case("a request that is wrong", *CONVERSATIONS)
async def refuses(probe: Probe) -> None:
    """It is refused in the dialect's form, and is no turn."""
    status = await probe.refused([QUESTION], temperature="warm")
    expect(400 <= status < 500, f"got {status} for a temperature that is text, expected 400")
    status, _, text = await probe.send("POST", f"/s/{probe.key}{probe.wire.path}", '{"model": "scripted", ')
    expect(400 <= status < 500, f"got {status} {text[:200]!r} for a body that is not JSON, expected 400")
    expect(not probe.draws, "the engine was asked")


@case("an engine that fails", *CONVERSATIONS, "completions")
async def engine_fails(probe: Probe) -> None:
    """The client gets an error in the dialect's form, and nothing is recorded; the next try is one turn."""
    for stream in (False, True):
        probe.engine.failing = 500
        status = await probe.refused([QUESTION], stream=stream)
        expect(status >= 500 or status == 429, f"got {status} for an engine that failed, expected 502 or the like")
        expect(not await probe.turns(), "a request that the engine failed is recorded as a turn")
    probe.engine.failing = None
    probe.say(ANSWER)
    expect_text(await probe.ask([QUESTION]), ANSWER)


@case("max_tokens cuts", *CONVERSATIONS, "completions")
async def cuts(probe: Probe) -> None:
    """The reply says so, and the turn ends without a stop token."""
    probe.say("one two three four five six", respell=False)
    reply = await probe.ask([QUESTION], max_tokens=3)
    expect(reply.finish == "length", f"the reason to end: got {reply.finish!r}, expected the dialect's word for length")
    (draw,) = probe.draws
    expect(len(draw.ids) == 3, f"{len(draw.ids)} tokens were sampled, expected 3: max_tokens did not reach the engine")
    expect_text(reply, probe.text_of(draw.ids))


@case("a prompt that is too long", *CONVERSATIONS, "completions")
async def too_long(probe: Probe) -> None:
    """It is refused in the dialect's form, and is no turn."""
    status = await probe.refused([user("7 " * 4000)])
    expect(400 <= status < 500, f"got {status} for a prompt beyond the engine's context, expected 400")


@case("a text", "completions")
async def text(probe: Probe) -> None:
    """The text that was sampled comes back, without the stop token."""
    probe.say(ANSWER)
    reply = await probe.ask([QUESTION])
    expect_text(reply, ANSWER)
    (draw,) = probe.draws
    read = probe.text_of(draw.prompt)
    expect(read == QUESTION["content"], f"the engine read {read!r:.200}, sent was {QUESTION['content']!r}")
    expected = len(draw.prompt), len(draw.ids)
    expect(reply.usage == expected, f"usage: got {reply.usage} tokens of prompt and completion, expected {expected}")


@case("a streamed text", "completions")
async def streamed_text(probe: Probe) -> None:
    """The parts of a stream are the text that was sampled."""
    probe.say(ANSWER)
    expect_text(await probe.ask([QUESTION], stream=True), ANSWER)


@case("ids", "completions")
async def ids(probe: Probe) -> None:
    """Ids reach the engine as they are, also those that no tokenizer would choose."""
    sent = probe.engine.respelled(probe.engine.tokens.encode("The year 1984 and 2001."))
    probe.say(ANSWER)
    expect_text(await probe.ask([user(sent)]), ANSWER)
    expect(probe.draws[0].prompt == sent, f"the engine read {probe.draws[0].prompt[:20]}, sent was {sent[:20]}")


@case("a text that goes on", "completions")
async def text_goes_on(probe: Probe) -> None:
    """A prompt that begins with what was read and sampled continues its ids."""
    probe.say("It is 1242", stop=False)
    probe.say(" Yes.")
    n = len(probe.engine.script[0])
    reply = await probe.ask([QUESTION], max_tokens=n)
    await probe.ask([user(f"{QUESTION['content']}{reply.content}, really?")])
    probe.expect_continues(probe.draws[1], probe.draws[0])


@case("log-probabilities that a client asks for", "chat")
async def client_logprobs(probe: Probe) -> str | None:
    """They are the engine's, or refused by name."""
    probe.say(ANSWER)
    status, body, answer = await probe.post([QUESTION], logprobs=True)
    if status == 400 and "logprobs" in (probe.wire.error_of(body) or ""):
        return "refused by name"
    expect(status == 200, f"got {status} {answer[:300]!r}, expected 200, or 400 that names logprobs")
    entries = ((body["choices"][0].get("logprobs") or {}).get("content")) or []
    log_probs = [as_float32(entry["logprob"]) for entry in entries]
    (draw,) = probe.draws
    expected = [as_float32(value) for value in draw.log_probs]
    expect(log_probs == expected, "the client's log-probabilities are not the engine's")
    return None


@case("several choices", "chat")
async def several_choices(probe: Probe) -> str | None:
    """Each is a turn with the same prompt, or n is refused by name."""
    probe.say("One.", "Two.")
    status, body, answer = await probe.post([QUESTION], n=2)
    if status == 400:
        expect("n" in (probe.wire.error_of(body) or ""), f"the error does not name n: {answer[:300]!r}")
        return "refused by name"
    expect(status == 200, f"got {status} {answer[:300]!r}, expected 200, or 400 that names n")
    texts = sorted(choice["message"]["content"] for choice in body["choices"])
    expect(texts == ["One.", "Two."], f"the client got {texts}, sampled were One. and Two.")
    return None


@case("a text that stops", "chat", "messages", "completions")
async def stop_text(probe: Probe) -> None:
    """The stop text is not in the reply, and all that was sampled is in the turn."""
    probe.say("one two halt three", respell=False)
    stop: Any = {"stop_sequences" if probe.wire.name == "messages" else "stop": ["halt"]}
    reply = await probe.ask([QUESTION], **stop)
    expect_text(reply, "one two ")
    expect(reply.finish == "stop", f"the reason to end: got {reply.finish!r}, expected the dialect's word for stop")
