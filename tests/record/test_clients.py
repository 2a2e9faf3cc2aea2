"""Real clients understand what the recorder writes, through a call of a tool, with a script in the model's place.

Each is skipped where its package is missing: ``pip install openai anthropic litellm openai-agents``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.run import record
from gymdata.errors import OutsideError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from sample_data.calculator_agent import TOOL, answer
from tests.collect.fake_parts import ROLE, FakeSampler
from tests.docs_blocks import ROOT, blocks
from tests.record.recorded_agent import collected
from tests.record.scripted_engine import Letters, Recording, Scripted, recording

KEY = "gymdata-k"
QUESTION = "How much is 2+40?"
FUNCTION = TOOL["function"]
THOUGHT, CALL, ANSWER = "A tool is needed.", 'CALL calculate {"expression": "2+40"}', "It is 42."
THINKS = f"THINK {THOUGHT}|{CALL}"


def result_of(message: Any) -> dict[str, Any]:
    """What the tool says to the call of a chat message."""
    (call,) = message.tool_calls
    result = answer(call.function.name, call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": result}


@pytest.fixture
def r(tmp_path: Path) -> Iterator[Recording]:
    """A recorder whose clients keep to one conversation."""
    with recording(tmp_path / "run") as r:
        yield r
        assert all(len(session.threads) == 1 for session in r.recorder.sessions.values())


@pytest.fixture
def openai(r: Recording) -> Any:
    package = pytest.importorskip("openai", reason="openai is not installed")
    return package.OpenAI(base_url="http://testserver/v1", api_key=KEY, max_retries=0, http_client=r.client)


@pytest.fixture
def anthropic(r: Recording) -> Any:
    package = pytest.importorskip("anthropic", reason="anthropic is not installed")
    return package.Anthropic(base_url="http://testserver", api_key=KEY, max_retries=0, http_client=r.client)


def test_openai_calls_a_tool_by_chat_completions(openai: Any, r: Recording) -> None:
    """Without a stream, then with one, whose parts of a call its accumulator puts together; what it sends back is what it
    got."""
    r.sampler.script = [THINKS, CALL, ANSWER]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    more: Any = {"tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    (first,) = openai.chat.completions.create(model="m", messages=messages, **more).choices
    assert first.message.reasoning_content == THOUGHT
    assert first.logprobs.content[0].top_logprobs[0].token == "T"
    options = {"include_usage": True}
    messages += [first.message, result_of(first.message)]
    with openai.chat.completions.stream(model="m", messages=messages, tools=[TOOL], stream_options=options) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.usage.total_tokens == sum(map(len, (r.sampler.requests[1].prompt_token_ids, CALL, "/")))
    message = streamed.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"expression": "2+40"}
    last = openai.chat.completions.create(model="m", messages=[*messages, message, result_of(message)], tools=[TOOL])
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == (ANSWER, "stop")


def test_openai_calls_a_tool_by_responses(openai: Any, r: Recording) -> None:
    """Every event of the stream is of the type that its package declares."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    r.sampler.script = [THINKS, ANSWER, THINKS]
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    with openai.responses.stream(model="m", input=QUESTION, tools=tools) as stream:
        events = list(stream)
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    items = [{"role": "user", "content": QUESTION}, *(item.model_dump(exclude_none=True) for item in first.output)]
    for item in items[1:]:
        item.pop("parsed_arguments", None)
        [part.pop("parsed", None) for part in item.get("content") or ()]
    result = answer(call.name, call.arguments)
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    second = openai.responses.create(model="m", input=items, tools=tools)
    n_tokens = sum(map(len, (r.sampler.requests[1].prompt_token_ids, ANSWER, "/")))
    assert (second.output_text, second.status, second.usage.total_tokens) == (ANSWER, "completed", n_tokens)
    counted = openai.responses.input_tokens.count(model="m", input=QUESTION, tools=tools)
    assert counted.input_tokens == len(r.sampler.requests[0].prompt_token_ids)
    strict = TypeAdapter(ResponseStreamEvent)
    raw = openai.responses.create(model="m", input=QUESTION, tools=tools, stream=True)
    kinds = [strict.validate_python(event.model_dump(), strict=True).type for event in raw]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert len(events) >= len(kinds)
    Response.model_validate(second.model_dump(), strict=True)


def test_anthropic_calls_a_tool(anthropic: Any, r: Recording) -> None:
    """A stream, then a message; every event is of the type that its package declares."""
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    r.sampler.script = [THINKS, f"THINK Easy.|{ANSWER}", THINKS]
    tools = [{"name": "calculate", "description": "Works it out.", "input_schema": FUNCTION["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked = {"model": "m", "max_tokens": 100, "tools": tools}
    with anthropic.messages.stream(messages=messages, **asked) as stream:
        first = stream.get_final_message()
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, first.content[0].thinking) == ("tool_use", THOUGHT)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": answer(use.name, json.dumps(use.input))}
    replies = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with anthropic.messages.stream(messages=[*messages, *replies], **asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
        second = stream.get_final_message()
    assert (second.content[-1].text, second.stop_reason) == (ANSWER, "end_turn")
    assert second.usage.output_tokens == len(f"THINK Easy.|{ANSWER}/")
    counted = anthropic.messages.count_tokens(model="m", messages=messages, tools=tools)
    assert counted.input_tokens == len(r.sampler.requests[0].prompt_token_ids)
    strict = TypeAdapter(RawMessageStreamEvent)
    raw = anthropic.messages.create(messages=messages, stream=True, **asked)
    kinds = [strict.validate_python(event.model_dump(), strict=True).type for event in raw]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    Message.model_validate(second.model_dump(), strict=True)


def test_clients_raise_their_own_errors(openai: Any, anthropic: Any, r: Recording) -> None:
    """For what is refused, for a server that is busy, and for an engine that fails within a stream."""
    import anthropic as theirs
    import openai as ours

    r.service.alive_s = 0.01

    async def breaks() -> None:
        await asyncio.sleep(0.2)  # the stream begins
        raise OutsideError("engine", "it broke")

    messages: Any = [{"role": "user", "content": QUESTION}]
    with pytest.raises(ours.BadRequestError) as refused:
        openai.chat.completions.create(model="m", messages=messages, logit_bias={"5": 1})
    assert (refused.value.param, refused.value.code) == ("logit_bias", "unsupported_parameter")
    r.sampler.script, r.sampler.pause = ["He|"] * 3, breaks
    with pytest.raises(ours.APIError, match="it broke"):
        list(openai.chat.completions.create(model="m", messages=messages, stream=True))
    with pytest.raises(theirs.APIStatusError, match="it broke"):
        list(anthropic.messages.create(model="m", messages=messages, max_tokens=5, stream=True))
    *_, last = openai.responses.create(model="m", input=QUESTION, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "engine: it broke")
    r.recorder.config = r.recorder.config.model_copy(update={"max_sessions": 0})
    with pytest.raises(ours.RateLimitError) as busy:
        openai.responses.create(model="m", input=QUESTION)
    assert busy.value.response.headers["retry-after"] == "5"
    with pytest.raises(theirs.RateLimitError, match="sessions are open"):
        anthropic.messages.create(model="m", messages=messages, max_tokens=5)


async def litellm_agent(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """By chat completions or by messages, streamed or not, as the task says."""
    import litellm

    name, stream = task["model"], task["stream"]
    base = base_url if name.startswith("openai") else base_url.removesuffix("/v1")

    def ask(messages: list[Any]) -> Any:
        more: Any = {"tools": [TOOL], "api_key": api_key, "api_base": base, "stream": stream}
        reply = litellm.completion(model=name, messages=messages, **more)
        return (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message

    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    first = ask(messages)
    ask([*messages, first.model_dump(), result_of(first)])


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("package", "agent", "model"),
    [
        ("litellm", "test_clients.py:litellm_agent", "openai/m"),
        ("litellm", "test_clients.py:litellm_agent", "anthropic/m"),
        ("agents", "framework_agent.py:solve", "OpenAIChatCompletionsModel"),
        ("agents", "framework_agent.py:solve", "OpenAIResponsesModel"),
    ],
)
def test_a_library_loops_over_a_tool(
    package: str, agent: str, model: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One conversation of two calls, without a break."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    task = {"task_id": "t", "prompt": QUESTION, "model": model, "stream": stream}
    sampler = FakeSampler(lambda prompt, _: ANSWER if ROLE["tool"] in prompt else CALL)
    assert collected([task], tmp_path / "run", sampler, agent=f"{Path(__file__).parent}/{agent}").failures == 0
    (row,) = read_table(tmp_path / "run", ROLLOUTS).to_pylist()
    assert (row["n_turns"], row["n_breaks"], row["messages"][-1]["content"]) == (2, 0, ANSWER)
    assert row["messages"][-2]["content"] == "42"


def test_the_client_of_the_documentation_is_recorded_with_its_task_and_reward(tmp_path: Path) -> None:
    """As a command of ``record``, over a scripted engine."""
    pytest.importorskip("openai", reason="openai is not installed")
    page = ROOT / "gymdata" / "docs" / "record-your-agent.md"
    (block,) = (block for block in blocks(page) if "GYMDATA_RECORD_URL" in block.text and block.language == "python")
    (tmp_path / "agent.py").write_text(block.text)
    parts = Parts(Scripted("It is 4."), Letters(), None, [], {"policy": "fake", "policy_hash": "fake-0"})
    agent = [sys.executable, str(tmp_path / "agent.py")]
    summary = record(output=tmp_path / "run", port=0, parts=parts, agent=agent)
    assert (summary.command_exit, summary.rollouts, summary.reward["mean"]) == (0, 1, 1.0)
    (row,) = read_table(tmp_path / "run", ROLLOUTS).to_pylist()
    assert (row["task_id"], row["messages"][-1]["content"]) == ("t1", "It is 4.")
