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

from gymdata.collect.setup import Parts
from gymdata.errors import OutsideError
from gymdata.record.run import record
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.collect.fake_parts import ROLE, FakeSampler
from tests.docs_blocks import ROOT, blocks
from tests.record.recorded_agent import collected
from tests.record.scripted_engine import Letters, Recording, Scripted, recording

KEY = "gymdata-k"
QUESTION = "How much is 2+40?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
THOUGHT, CALL, ANSWER = "A tool is needed.", 'CALL add {"a": 2, "b": 40}', "It is 42."
THINKS = f"THINK {THOUGHT}|{CALL}"


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


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
    """Without a stream, then with one; what it sends back is what it got."""
    r.sampler.script = [THINKS, THINKS, ANSWER]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = openai.chat.completions.create(
        model="m", messages=messages, tools=[TOOL], logprobs=True, top_logprobs=1, n=2
    )
    first, second = answer.choices
    assert first.message.reasoning_content == THOUGHT
    assert second.logprobs.content[0].top_logprobs[0].token == "T"
    (call,) = first.message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    options = {"include_usage": True}
    with openai.chat.completions.stream(model="m", messages=messages, tools=[TOOL], stream_options=options) as events:
        final = list(events) and events.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (ANSWER, "stop")
    assert final.usage.total_tokens == sum(map(len, (r.sampler.requests[1].prompt_token_ids, ANSWER, "/")))


def test_openai_streams_calls_of_tools_by_chat_completions(openai: Any, r: Recording) -> None:
    """Its accumulator puts names and arguments together."""
    r.sampler.script = [CALL]
    messages = [{"role": "user", "content": QUESTION}]
    with openai.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as events:
        kinds = [event.type for event in events]
        message = events.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 40}


def test_openai_completes_text(openai: Any, r: Recording) -> None:
    """Streamed, too."""
    r.sampler.script = ["upon a time"] * 3
    answer = openai.completions.create(model="m", prompt="once", n=2)
    assert [choice.text for choice in answer.choices] == ["upon a time"] * 2
    chunks = list(openai.completions.create(model="m", prompt="once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "upon a time"


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
    result = str(add(**json.loads(call.arguments)))
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
    tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked = {"model": "m", "max_tokens": 100, "tools": tools}
    with anthropic.messages.stream(messages=messages, **asked) as stream:
        first = stream.get_final_message()
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, first.content[0].thinking) == ("tool_use", THOUGHT)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))}
    answer = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with anthropic.messages.stream(messages=[*messages, *answer], **asked) as stream:
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

    async def breaks() -> None:
        for _ in range(100):  # turns of the loop, in which the stream begins
            await asyncio.sleep(0)
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
        answer = litellm.completion(model=name, messages=messages, **more)
        return (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message

    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    first = ask(messages)
    (call,) = first.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    ask([*messages, first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}])


async def framework_agent(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """The framework runs the tool itself, by either of its models."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    model = getattr(agents, task["model"])(model="m", openai_client=AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = agents.Agent(name="calculator", tools=[agents.function_tool(add)], model=model)
    if not task["stream"]:
        await agents.Runner.run(agent, task["prompt"])
        return
    async for _ in agents.Runner.run_streamed(agent, task["prompt"]).stream_events():
        pass


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("package", "agent", "model"),
    [
        ("litellm", "litellm_agent", "openai/m"),
        ("litellm", "litellm_agent", "anthropic/m"),
        ("agents", "framework_agent", "OpenAIChatCompletionsModel"),
        ("agents", "framework_agent", "OpenAIResponsesModel"),
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
    assert collected([task], tmp_path / "run", sampler, agent=f"{__file__}:{agent}").failures == 0
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
