"""Real clients understand what the dialects write, through a call of a tool, with a script in the model's place.

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
from gymdata.record.request import RequestError
from gymdata.record.run import record
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.docs_blocks import ROOT, blocks
from tests.record.scripted_engine import Letters, Scripted
from tests.record.scripted_server import Reply, ScriptedServer
from tests.servers import serving

KEY = "gymdata-secret"
QUESTION = "How much is 2+40?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ANSWER = "The tool returned: 42"


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def url(server: ScriptedServer) -> Iterator[str]:
    with serving(server.app()) as url:
        yield url
    assert KEY not in repr(server.requests)


@pytest.fixture
def openai(url: str) -> Any:
    package = pytest.importorskip("openai", reason="openai is not installed")
    return package.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def anthropic(url: str) -> Any:
    package = pytest.importorskip("anthropic", reason="anthropic is not installed")
    return package.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def test_openai_calls_a_tool_by_chat_completions(openai: Any, server: ScriptedServer) -> None:
    """Without a stream, then with one; what it sends back is what it got."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = openai.chat.completions.create(
        model="m", messages=messages, tools=[TOOL], logprobs=True, top_logprobs=2, n=2
    )
    first, second = answer.choices
    assert first.message.reasoning_content == "A tool is needed."
    assert second.logprobs.content[0].top_logprobs[1].token == "other"
    (call,) = first.message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    options = {"include_usage": True}
    with openai.chat.completions.stream(model="m", messages=messages, tools=[TOOL], stream_options=options) as events:
        final = list(events) and events.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (ANSWER, "stop")
    assert final.usage.total_tokens == 16
    assert server.requests[1].messages[1]["reasoning"] == "A tool is needed."
    assert server.requests[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 40}


def test_openai_streams_calls_of_tools_by_chat_completions(openai: Any) -> None:
    """Its accumulator puts names and arguments together."""
    messages = [{"role": "user", "content": QUESTION}]
    with openai.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as events:
        kinds = [event.type for event in events]
        message = events.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 40}


def test_openai_completes_text(openai: Any) -> None:
    """Streamed, too."""
    answer = openai.completions.create(model="m", prompt="once", n=2)
    assert [choice.text for choice in answer.choices] == ["Hello, world."] * 2
    chunks = list(openai.completions.create(model="m", prompt="once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world."


def test_openai_calls_a_tool_by_responses(openai: Any, server: ScriptedServer) -> None:
    """Every event of the stream is of the type that its package declares."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    tools = [{"type": "function", **FUNCTION, "strict": False}]
    events = []
    with openai.responses.stream(model="m", input=QUESTION, instructions="Use tools.", tools=tools) as stream:
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
    assert (second.output_text, second.status, second.usage.total_tokens) == (ANSWER, "completed", 16)
    assert server.requests[1].messages[1]["reasoning"] == "A tool is needed."
    assert openai.responses.input_tokens.count(model="m", input=QUESTION).input_tokens == 12
    strict = TypeAdapter(ResponseStreamEvent)
    raw = openai.responses.create(model="m", input=QUESTION, tools=tools, stream=True)
    kinds = [strict.validate_python(event.model_dump(), strict=True).type for event in raw]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert len(events) >= len(kinds)
    Response.model_validate(second.model_dump(), strict=True)


def test_anthropic_calls_a_tool(anthropic: Any, server: ScriptedServer) -> None:
    """A stream, then a message; every event is of the type that its package declares."""
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked = {"model": "m", "max_tokens": 100, "tools": tools, "system": "Use tools."}
    with anthropic.messages.stream(messages=messages, **asked) as stream:
        assert "".join(stream.text_stream) == "I will call it."
        first = stream.get_final_message()
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, first.content[0].thinking) == ("tool_use", "A tool is needed.")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))}
    answer = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = anthropic.messages.create(messages=[*messages, *answer], **asked)
    assert (second.content[-1].text, second.stop_reason, second.usage.output_tokens) == (ANSWER, "end_turn", 4)
    assert server.requests[1].messages[2]["reasoning"] == "A tool is needed."
    assert anthropic.messages.count_tokens(model="m", messages=messages).input_tokens == 12
    strict = TypeAdapter(RawMessageStreamEvent)
    raw = anthropic.messages.create(messages=messages, stream=True, **asked)
    kinds = [strict.validate_python(event.model_dump(), strict=True).type for event in raw]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    Message.model_validate(second.model_dump(), strict=True)


def test_clients_raise_their_own_errors(openai: Any, anthropic: Any, server: ScriptedServer) -> None:
    """For what is refused, for a server that is busy, and for an engine that fails within a stream."""
    import anthropic as theirs
    import openai as ours

    messages: Any = [{"role": "user", "content": QUESTION}]
    with pytest.raises(ours.BadRequestError) as refused:
        openai.chat.completions.create(model="m", messages=messages, logit_bias={"5": 1})
    assert (refused.value.param, refused.value.code) == ("logit_bias", "unsupported_parameter")
    server.script = lambda _: Reply("He", error=RequestError("busy", "too many sessions", retry_after=3.0))
    with pytest.raises(ours.RateLimitError) as busy:
        openai.responses.create(model="m", input=QUESTION)
    assert busy.value.response.headers["retry-after"] == "3"
    with pytest.raises(theirs.RateLimitError, match="too many sessions"):
        anthropic.messages.create(model="m", messages=messages, max_tokens=5)
    with pytest.raises(ours.APIError, match="too many sessions"):
        list(openai.chat.completions.create(model="m", messages=messages, stream=True))
    with pytest.raises(theirs.APIStatusError, match="too many sessions"):
        list(anthropic.messages.create(model="m", messages=messages, max_tokens=5, stream=True))
    *_, last = openai.responses.create(model="m", input=QUESTION, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "too many sessions")


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["openai/m", "anthropic/m"])
def test_litellm_calls_a_tool(model: str, stream: bool, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chat completions and by messages, streamed or not."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    base = f"{url}/v1" if model.startswith("openai") else url

    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(
            model=model, messages=messages, tools=[TOOL], api_key=KEY, api_base=base, stream=stream
        )
        return (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(messages)
    (call,) = first.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert ask(messages).content == ANSWER


@pytest.mark.full
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_loop_over_a_tool(model: str, streamed: bool, url: str) -> None:
    """The framework runs the tool itself, by both of its models."""
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def run() -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        agent = agents.Agent(
            name="calculator",
            instructions="Use tools.",
            tools=[agents.function_tool(add)],
            model=getattr(agents, model)(model="m", openai_client=client),
        )
        if not streamed:
            return (await agents.Runner.run(agent, QUESTION)).final_output
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == ANSWER


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
