"""Sessions of agents: several requests at once, branches, ends, and the paths beside the dialects, in front of an engine
whose every sample is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from tests.record.probe import ADD, CONVERSATIONS, Probe, Served, case, serving, system, user
from tests.record.token_server import CONTEXT

pytestmark = pytest.mark.tokenizer
QUESTION, ANSWER = user("How much is 1234+8?"), "It is 1242, which is 1234 and 8."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What the recorder wrote is clean at the end."""
    run = tmp_path_factory.mktemp("sampled") / "run"
    with serving(run) as recorder:
        yield recorder
    assert validate(run).ok


@case(*CONVERSATIONS)
async def test_parallel_requests_are_branches(probe: Probe) -> None:
    """Each client gets the answer to its own question, and each turn has the prompt that it was sampled after."""
    questions = [user(f"Question number {k}{k}{k}?") for k in range(4)]
    probe.say(*(f"Answer number {k}{k}{k}." for k in range(4)))
    probe.engine.hold(4)
    replies = await asyncio.gather(*(probe.ask([question]) for question in questions))
    probe.engine.hold(0)
    for question, reply in zip(questions, replies, strict=True):
        draw = next((d for d in probe.draws if question["content"] in probe.text_of(d.prompt)), None)
        assert draw is not None
        assert reply.content == probe.text_of(draw.ids[:-1])
    probe.say("Yes.")
    before = next(d for d in probe.draws if questions[1]["content"] in probe.text_of(d.prompt))
    await probe.ask([questions[1], replies[1].message(), user("Sure?")])
    probe.expect_continues(probe.draws[-1], before)


@case("chat")
async def test_sessions_are_kept_apart(probe: Probe) -> None:
    """The same messages in two sessions are a turn of each, and both are continued by their own."""
    probe.say("One.", "Two.", "Three.")
    keys = [f"{probe.key}-a", f"{probe.key}-b"]
    replies = [await probe.ask([QUESTION], key=key) for key in keys]
    await probe.ask([QUESTION, replies[0].message(), user("Sure?")], key=keys[0])
    counts = [len(await probe.turns(key)) for key in keys]
    assert counts == [2, 1]


@case("chat")
async def test_the_same_request_again(probe: Probe) -> None:
    """It is another turn with the same prompt, and the client continues either."""
    probe.say("One.", "Two.", "Yes.")
    first = await probe.ask([QUESTION])
    await probe.ask([QUESTION])
    assert probe.draws[0].prompt == probe.draws[1].prompt
    await probe.ask([QUESTION, first.message(), user("Sure?")])
    probe.expect_continues(probe.draws[2], probe.draws[0])


@case(*CONVERSATIONS)
async def test_another_system_prompt_begins_a_branch(probe: Probe) -> None:
    """The model reads the new one."""
    probe.say(ANSWER, "Yes.")
    reply = await probe.ask([system("Be brief."), QUESTION])
    await probe.ask([system("Be thorough."), QUESTION, reply.message(), user("Sure?")])
    probe.expect_read(probe.draws[1], "Be thorough.", never=["Be brief."])
    await _labels_differ(probe)


@case("chat")
async def test_a_summary_in_place_of_history_begins_a_branch(probe: Probe) -> None:
    """The model reads the summary and not what it replaces."""
    probe.say(ANSWER, "Yes.")
    await probe.ask([QUESTION])
    await probe.ask([user("Summary: a sum was asked."), user("Go on.")])
    probe.expect_read(probe.draws[1], "Summary: a sum was asked.", never=[QUESTION["content"]])
    await _labels_differ(probe)


@case("chat")
async def test_a_side_request_has_a_label_of_its_own(probe: Probe) -> None:
    """A title between two turns of the conversation is neither part of it nor a break."""
    probe.say("One.", "A title", "Two.")
    reply = await probe.ask([system("You add."), QUESTION], [ADD])
    await probe.ask([system("Give a title."), QUESTION])
    await probe.ask([system("You add."), QUESTION, reply.message(), user("Sure?")], [ADD])
    probe.expect_continues(probe.draws[2], probe.draws[0])
    agents = [turn.agent for turn in await probe.finish()]
    fine = len(agents) == 3 and agents[0] == agents[2] != agents[1]
    assert fine


async def _labels_differ(probe: Probe) -> None:
    agents = [turn.agent for turn in await probe.finish()]
    assert len(agents) == 2
    assert agents[0] != agents[1]


@case("chat")
async def test_finish(probe: Probe) -> None:
    """Status and reward are kept, a second finish changes nothing, and the session gets no more turns."""
    probe.say(ANSWER)
    await probe.ask([QUESTION])
    wrong, *_ = await probe.send("POST", f"/rollouts/{probe.key}/finish", {"status": "bogus"})
    assert 400 <= wrong < 500
    status, state, _ = await probe.send("GET", f"/rollouts/{probe.key}?turns=true")
    assert status == 200
    assert state.get("status") == "open"
    await probe.finish(status="truncated", reward=0.25)
    _, state, _ = await probe.send("GET", f"/rollouts/{probe.key}?turns=true")
    assert state.get("status") == "truncated"
    assert state.get("reward", 0.25) == 0.25
    await probe.finish(status="truncated", reward=0.25)
    status = await probe.refused([QUESTION])
    assert 400 <= status < 500


@case("chat")
async def test_a_session_that_nobody_began(probe: Probe) -> None:
    """404, for its state and its end."""
    for method, path in (("GET", ""), ("GET", "?turns=true"), ("POST", "/finish")):
        status, *_ = await probe.send(method, f"/rollouts/{probe.key}-nobody{path}", {} if method == "POST" else None)
        assert status == 404


@case("chat")
async def test_models(probe: Probe) -> None:
    """GET /v1/models lists one at least, by its id."""
    status, body, _ = await probe.send("GET", "/v1/models")
    assert status == 200
    assert [type(model["id"]) for model in body["data"]] == [str]


@case("messages")
async def test_count_tokens(probe: Probe) -> None:
    """The count is that of the prompt which the same request then has, and is no turn."""
    body = probe.wire.body([QUESTION], [ADD], as_parts=False, more={})
    body.pop("max_tokens")
    status, counted, _ = await probe.send("POST", f"/s/{probe.key}/v1/messages/count_tokens", body)
    assert status == 200
    assert not await probe.turns()
    probe.say(ANSWER)
    await probe.ask([QUESTION], [ADD])
    expected = len(probe.draws[0].prompt)
    assert counted.get("input_tokens") == expected


@case(*CONVERSATIONS)
async def test_max_tokens_beyond_the_context(probe: Probe) -> None:
    """It is cut to what the context has room for, or refused; nothing else is sampled."""
    probe.say(ANSWER)
    status, *_ = await probe.post([QUESTION], max_tokens=10 * CONTEXT)
    assert status in (200, 400)


@case(*CONVERSATIONS)
async def test_a_request_without_content(probe: Probe) -> None:
    """No messages are an error, and no turn."""
    status = await probe.refused([])
    assert 400 <= status < 500


@case(*CONVERSATIONS)
async def test_text_in_many_alphabets(probe: Probe) -> None:
    """What the client gets is what was sampled, beyond ASCII too."""
    answer: Any = "Größe 25 – naïve 𝛑 ≈ 3.14 日本"
    probe.say(answer)
    reply = await probe.ask([user("Ünïcode? 😀")], stream=True)
    assert reply.content == answer
    probe.expect_read(probe.draws[0], "Ünïcode? 😀")
