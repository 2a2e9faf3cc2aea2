"""The cases of sessions: several requests at once, branches, ends, and the paths beside the dialects."""

from __future__ import annotations

import asyncio
from typing import Any

from gymdata.check.conformance.cases import ANSWER, QUESTION
from gymdata.check.conformance.engine import CONTEXT
from gymdata.check.conformance.probe import ADD, CONVERSATIONS, Probe, case, expect, expect_text, system, user


@case("parallel requests are branches", *CONVERSATIONS)
async def parallel(probe: Probe) -> None:
    """Each client gets the answer to its own question, and each turn has the prompt that it was sampled after."""
    questions = [user(f"Question number {k}{k}{k}?") for k in range(4)]
    probe.say(*(f"Answer number {k}{k}{k}." for k in range(4)))
    probe.engine.hold(4)
    replies = await asyncio.gather(*(probe.ask([question]) for question in questions))
    probe.engine.hold(0)
    for question, reply in zip(questions, replies, strict=True):
        draw = next((d for d in probe.draws if question["content"] in probe.text_of(d.prompt)), None)
        expect(draw is not None, f"the engine never read {question['content']!r}")
        assert draw is not None
        expect_text(reply, probe.text_of(draw.ids[:-1]))
    probe.say("Yes.")
    before = next(d for d in probe.draws if questions[1]["content"] in probe.text_of(d.prompt))
    await probe.ask([questions[1], replies[1].message(), user("Sure?")])
    probe.expect_continues(probe.draws[-1], before)


@case("sessions are kept apart", "chat")
async def sessions(probe: Probe) -> None:
    """The same messages in two sessions are a turn of each, and both are continued by their own."""
    probe.say("One.", "Two.", "Three.")
    keys = [f"{probe.key}-a", f"{probe.key}-b"]
    replies = [await probe.ask([QUESTION], key=key) for key in keys]
    await probe.ask([QUESTION, replies[0].message(), user("Sure?")], key=keys[0])
    counts = [len(await probe.turns(key)) for key in keys]
    expect(counts == [2, 1], f"the sessions have {counts} turns, expected [2, 1]")


@case("the same request again", "chat")
async def retry(probe: Probe) -> None:
    """It is another turn with the same prompt, and the client continues either."""
    probe.say("One.", "Two.", "Yes.")
    first = await probe.ask([QUESTION])
    await probe.ask([QUESTION])
    expect(probe.draws[0].prompt == probe.draws[1].prompt, "the same messages were rendered into another prompt")
    await probe.ask([QUESTION, first.message(), user("Sure?")])
    probe.expect_continues(probe.draws[2], probe.draws[0])


@case("another system prompt begins a branch", *CONVERSATIONS)
async def other_system(probe: Probe) -> None:
    """The model reads the new one."""
    probe.say(ANSWER, "Yes.")
    reply = await probe.ask([system("Be brief."), QUESTION])
    await probe.ask([system("Be thorough."), QUESTION, reply.message(), user("Sure?")])
    probe.expect_read(probe.draws[1], "Be thorough.", never=["Be brief."])
    await _labels_differ(probe)


@case("a summary in place of history begins a branch", "chat")
async def compaction(probe: Probe) -> None:
    """The model reads the summary and not what it replaces."""
    probe.say(ANSWER, "Yes.")
    await probe.ask([QUESTION])
    await probe.ask([user("Summary: a sum was asked."), user("Go on.")])
    probe.expect_read(probe.draws[1], "Summary: a sum was asked.", never=[QUESTION["content"]])
    await _labels_differ(probe)


@case("a side request has a label of its own", "chat")
async def side_request(probe: Probe) -> None:
    """A title between two turns of the conversation is neither part of it nor a break."""
    probe.say("One.", "A title", "Two.")
    reply = await probe.ask([system("You add."), QUESTION], [ADD])
    await probe.ask([system("Give a title."), QUESTION])
    await probe.ask([system("You add."), QUESTION, reply.message(), user("Sure?")], [ADD])
    probe.expect_continues(probe.draws[2], probe.draws[0])
    agents = [turn.agent for turn in await probe.finish()]
    fine = len(agents) == 3 and agents[0] == agents[2] != agents[1]
    expect(fine, f"the labels are {agents}, expected one for turns 0 and 2, and another for turn 1")


async def _labels_differ(probe: Probe) -> None:
    agents = [turn.agent for turn in await probe.finish()]
    expect(
        len(agents) == 2 and agents[0] != agents[1],
        f"the branch has no agent label of its own: the labels are {agents}",
    )


@case("finish", "chat")
async def finish(probe: Probe) -> None:
    """Status and reward are kept, a second finish changes nothing, and the session gets no more turns."""
    probe.say(ANSWER)
    await probe.ask([QUESTION])
    wrong, _, text = await probe.send("POST", f"/rollouts/{probe.key}/finish", {"status": "bogus"})
    expect(400 <= wrong < 500, f"finish with an unknown status: got {wrong} {text[:200]!r}, expected 400")
    status, state, _ = await probe.send("GET", f"/rollouts/{probe.key}?turns=true")
    expect(status == 200 and state.get("status") == "open", f"before its end the status is {state}, expected open")
    await probe.finish(status="truncated", reward=0.25)
    _, state, _ = await probe.send("GET", f"/rollouts/{probe.key}?turns=true")
    expect(state.get("status") == "truncated", f"status: got {state.get('status')!r}, expected truncated")
    expect(state.get("reward", 0.25) == 0.25, f"reward: got {state.get('reward')!r}, expected 0.25")
    await probe.finish(status="truncated", reward=0.25)
    status = await probe.refused([QUESTION])
    expect(400 <= status < 500, f"a request after the end: got {status}, expected 409 or another of 400 to 499")


@case("a session that nobody began", "chat")
async def unknown(probe: Probe) -> None:
    """404, for its state and its end."""
    for method, path in (("GET", ""), ("GET", "?turns=true"), ("POST", "/finish")):
        status, _, text = await probe.send(
            method, f"/rollouts/{probe.key}-nobody{path}", {} if method == "POST" else None
        )
        expect(
            status == 404, f"{method} /rollouts/KEY{path} of an unknown key: got {status} {text[:200]!r}, expected 404"
        )


@case("models", "chat")
async def models(probe: Probe) -> None:
    """GET /v1/models lists one at least, by its id."""
    status, body, text = await probe.send("GET", "/v1/models")
    listed = body.get("data") if isinstance(body, dict) else None
    named = isinstance(listed, list) and listed and all(isinstance(m.get("id"), str) for m in listed)
    expect(status == 200 and bool(named), f"GET /v1/models: got {status} {text[:300]!r}, expected a list of models")


@case("count_tokens", "messages")
async def count_tokens(probe: Probe) -> None:
    """The count is that of the prompt which the same request then has, and is no turn."""
    body = probe.wire.body([QUESTION], [ADD], as_parts=False, more={})
    body.pop("max_tokens")
    status, counted, text = await probe.send("POST", f"/s/{probe.key}/v1/messages/count_tokens", body)
    expect(status == 200, f"count_tokens: got {status} {text[:200]!r}, expected 200")
    expect(not await probe.turns(), "a count of tokens is recorded as a turn")
    probe.say(ANSWER)
    await probe.ask([QUESTION], [ADD])
    expected = len(probe.draws[0].prompt)
    expect(counted.get("input_tokens") == expected, f"count_tokens: got {counted}, expected {expected} input_tokens")


@case("max_tokens beyond the context", *CONVERSATIONS)
async def clamps(probe: Probe) -> None:
    """It is cut to what the context has room for, or refused; nothing else is sampled."""
    probe.say(ANSWER)
    status, _, text = await probe.post([QUESTION], max_tokens=10 * CONTEXT)
    expect(status in (200, 400), f"got {status} {text[:200]!r}, expected 200 or 400")


@case("a request without content", *CONVERSATIONS)
async def empty(probe: Probe) -> None:
    """No messages are an error, and no turn."""
    status = await probe.refused([])
    expect(400 <= status < 500, f"got {status} for no messages, expected 400")


@case("text in many alphabets", *CONVERSATIONS)
async def alphabets(probe: Probe) -> None:
    """What the client gets is what was sampled, beyond ASCII too."""
    answer: Any = "Größe 25 – naïve 𝛑 ≈ 3.14 日本"
    probe.say(answer)
    reply = await probe.ask([user("Ünïcode? 😀")], stream=True)
    expect_text(reply, answer)
    probe.expect_read(probe.draws[0], "Ünïcode? 😀")
