"""The sampler for servers that take messages, against a small real server with each way to say what a prompt must be."""

from __future__ import annotations

from typing import Any

import pytest

from gymdata.chat.template import TransformersChat
from gymdata.engines.port import Conversation, SampleRequest
from gymdata.engines.servers.chat_server import ChatServerSampler, OnPolicyPrompts
from gymdata.errors import UsageError
from tests.engines.against import against, sampling
from tests.faulty_server import Settings, chat_prompt, draw, render

pytestmark = pytest.mark.torch

pytest.importorskip("aiohttp")
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hm"},
    {"role": "user", "content": "go on"},
]
#: What was sampled as "hm", in ids that no rendering gives.
HELD = [*render(TALK[:1], None, 2), 8, 150, 151, 2]
WANTED = [*HELD, *render(TALK[2:], None, 2), 8]
REQUEST = SampleRequest("r", WANTED, max_tokens=6, seed=11, conversation=Conversation(TALK, None, HELD))


def sampled(settings: Settings, request: SampleRequest = REQUEST, **options: Any) -> Any:
    return against(settings, sampling(request), ChatServerSampler, **options)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("way", ["ids", "prefix", "messages"])
def test_the_best_way_that_the_server_proves_is_used(way: str, refuses: bool) -> None:
    """Ids where the server reads them, else the prefix where it splices it, else messages; unknown fields do no harm."""
    settings = Settings(way=way, refuses_unknown_fields=refuses)

    async def use(sampler: ChatServerSampler) -> Any:
        await sampler.start()
        return sampler.facts(), await sampler.sample(REQUEST)

    facts, (out,) = against(settings, use, ChatServerSampler)
    assert facts["continuity"] == way
    assert list(out.prompt_token_ids) == (WANTED if way != "messages" else [*render(TALK, None, 2), 8])
    assert (out.token_ids, out.log_probs, out.finish_reason) == draw(11, list(out.prompt_token_ids), 6, settings)
    assert bool(facts.get("notes")) == (way == "messages")


def test_what_is_kept_is_what_the_server_read() -> None:
    """A server that reads another prompt than was sent is believed in what it reports."""
    (out,) = sampled(Settings(mode="wrong_prompt_ids"))
    assert list(out.prompt_token_ids) == [0, *render(TALK, None, 2), 8]


def test_a_group_is_one_request_with_alternatives() -> None:
    """n choices come back in order, each with its own seed, the shared prompt and K alternatives a token."""
    settings = Settings()
    request = SampleRequest("r", WANTED, max_tokens=5, seed=3, n=3, conversation=Conversation(TALK, None, HELD))
    out = sampled(settings, request, sampling={"top_logprobs": 2})
    assert [g.token_ids for g in out] == [draw(3 + i, WANTED, 5, settings)[0] for i in range(3)]
    assert all([len(row) for row in g.top_log_probs] == [2] * len(g.token_ids) for g in out)


@pytest.mark.parametrize(("shows", "choice"), [("none auto", "none"), ("auto", "auto")])
def test_tools_reach_the_prompt(shows: str, choice: str) -> None:
    """The tool_choice is one under which the server writes tools into the prompt; calls are parsed here, so "none" first."""
    settings = Settings(way="messages", shows_tools=shows)
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    text = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call, text]}
    messages = [TALK[0], called, {"role": "tool", "content": "5"}]
    request = SampleRequest(
        "r", WANTED, max_tokens=2, conversation=Conversation(messages, [{"type": "function"}], HELD)
    )
    (out,) = sampled(settings, request)
    assert settings.requests[-1]["tool_choice"] == choice
    assert list(out.prompt_token_ids) == chat_prompt(settings.requests[-1], settings)
    sent = settings.requests[-1]["messages"][1]["tool_calls"]
    assert [c["function"]["arguments"] for c in sent] == ['{"x": 1}', '{"x": 1}']


def test_a_server_that_hides_tools_is_refused_when_there_are_some() -> None:
    """Sampling without the tools would be another task."""
    request = SampleRequest("r", WANTED, max_tokens=2, conversation=Conversation(TALK, [{"type": "function"}], HELD))
    with pytest.raises(UsageError, match="leaves tools out"):
        sampled(Settings(way="messages", shows_tools=""), request)


def test_tool_calls_is_no_reason_to_stop_sampling() -> None:
    """A server that says "tool_calls" is asked by the ids whether the generation was cut."""
    request = SampleRequest("r", WANTED, max_tokens=3, seed=0, n=20, conversation=Conversation(TALK, None, HELD))
    out = sampled(Settings(mode="tool_calls"), request, sampling={"stop_token_ids": (2,)})
    reasons = [g.finish_reason for g in out]
    assert reasons == [draw(i, WANTED, 3, Settings())[2] for i in range(20)]
    assert set(reasons) == {"stop", "length"}


STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, NEXT = {"role": "user", "content": "12+3?"}, {"role": "user", "content": "so?"}
SAID = {"role": "assistant", "content": "15", "reasoning": "12 and 3"}


def test_the_next_prompt_is_bridged_spliced_or_rendered(policy: str) -> None:
    """By the bridge where the template leaves the past alone; by the splice where it rewrites it; else as rendered."""
    kept = TransformersChat.load(policy)
    held = [*kept.render([USER], None), *kept.encode("<think>12 and 3</think>15<|im_end|>")]
    wanted = [*held, *kept.encode("\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n")]
    assert OnPolicyPrompts(kept)(held, [USER, SAID], [NEXT], None) == wanted
    strips = kept.with_template(STRIPS)
    assert not strips.keeps_history()
    assert OnPolicyPrompts(strips)(held, [USER, SAID], [NEXT], None) == wanted
    lost = [*held, *held]  # more turns than the conversation has: no cut can be proved
    assert OnPolicyPrompts(strips)(lost, [USER, SAID], [NEXT], None) == strips.render([USER, SAID, NEXT], None)
