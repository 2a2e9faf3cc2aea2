"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from gymdata.commands.record.body import Body
from gymdata.commands.record.dialects import dialect
from gymdata.commands.record.dialects._wire import (
    Completing,
    Limit,
    Object,
    Objects,
    OpenAI,
    Share,
    Stop,
    arguments_text,
    frame,
    function_tool,
    logprob_items,
    one_text,
    openai_choice,
    response_format,
    select,
    stored_messages,
)
from gymdata.commands.record.request import AgentCompletion, AgentRequest, RequestError
from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, JsonObject, field_at

_Penalty = Annotated[float | None, pydantic.Field(ge=-2, le=2)]
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "seed"),
)


class _StreamOptions(Body):
    without_effect: ClassVar[Sequence[str]] = ("include_obfuscation", "continuous_usage_stats")

    include_usage: bool = False


class _Body(Completing):
    without_effect: ClassVar[Sequence[str]] = (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity"),
    )
    unsupported: ClassVar[Sequence[str]] = (
        *("logit_bias", "functions", "function_call", "audio", "prediction", "web_search_options", "moderation"),
        *("chat_template", "chat_template_kwargs", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
    )

    messages: Objects
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    max_completion_tokens: Limit = None
    max_tokens: Limit = None
    stop: Stop
    stream_options: _StreamOptions = _StreamOptions()
    response_format: Object
    logprobs: bool = False
    top_logprobs: Annotated[int, pydantic.Field(ge=0, le=20)] = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    n: Literal[1] = 1
    modalities: Sequence[Literal["text"]] = ()
    top_k: Annotated[int | None, pydantic.Field(ge=-1)] = None
    min_p: Share = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[float | None, pydantic.Field(ge=0)] = None
    min_tokens: Annotated[int | None, pydantic.Field(ge=0)] = None
    seed: int | None = None


@dialect("chat")
class ChatCompletions(OpenAI):
    """OpenAI's chat completions, with vLLM's ``return_token_ids`` and sampling parameters."""

    name = "chat"
    paths: Sequence[str] = ("/v1/chat/completions",)

    def read(self, body: JsonObject, headers: Mapping[str, str]) -> AgentRequest:
        fields = _Body.of(body)
        tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.tools)]
        if fields.top_logprobs and not fields.logprobs:
            raise RequestError.field("top_logprobs", "needs logprobs: true")
        schema = field_at(fields.response_format, "json_schema.schema")
        return AgentRequest(
            model=fields.model,
            messages=stored_messages(lambda: [_message(message) for message in fields.messages]),
            tools=tools or None,
            tool_choice=openai_choice(fields.tool_choice, "function.name", tools),
            parallel_tool_calls=fields.parallel_tool_calls,
            sampling=select(body, *_SAMPLING),
            max_tokens=fields.max_completion_tokens or fields.max_tokens,
            stop=tuple(fields.stop),
            stream=fields.stream,
            response_format=response_format(fields.response_format.get("type"), schema, "response_format"),
            logprobs=fields.top_logprobs if fields.logprobs else None,
            tokens_as_ids=fields.return_tokens_as_token_ids,
            # OpenCode's, whose sub-agents have sessions of their own.
            conversation_hint="sub-agent" if headers.get("x-parent-session-id") else None,
            echo={"usage": fields.stream_options.include_usage, "ids": fields.return_token_ids},
        )

    def write(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        n_prompt, n_generated = len(completion.prompt_token_ids), len(completion.token_ids)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        body = {
            "id": f"chatcmpl-{completion.id}",
            "object": "chat.completion",
            "created": completion.created,
            "model": request.model,
            "choices": [_choice(request, completion)],
            "usage": usage,
        }
        return body | ({"prompt_token_ids": list(completion.prompt_token_ids)} if request.echo["ids"] else {})

    def frames(self, request: AgentRequest, body: JsonObject) -> bytes:
        (choice,) = body["choices"]
        message = choice["message"]
        parts: list[JsonObject] = [{"role": "assistant", "content": ""}]
        parts += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        parts += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(message.get("tool_calls", ()))]
        choices = [{**_UNENDED, "delta": part} for part in parts]
        choices.append({name: value for name, value in choice.items() if name != "message"} | {"delta": {}})
        common = select(body, "id", "created", "model") | {"object": "chat.completion.chunk"}
        chunks: list[JsonObject] = [{**common, "choices": [one]} for one in choices]
        chunks[-1] |= select(body, "prompt_token_ids")
        if request.echo["usage"]:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
            chunks.append({**common, "choices": [], "usage": body["usage"]})
        return b"".join(map(frame, chunks)) + frame("[DONE]")

    def failed(self, request: AgentRequest, error: RequestError) -> bytes:  # noqa: ARG002 - the port's signature
        return frame(self.error(error)) + frame("[DONE]")


#: The choice of a part of a stream that is not its end, without its delta.
_UNENDED: JsonObject = {"index": 0, "logprobs": None, "finish_reason": None}


class _Tokenize(Body):
    unsupported: ClassVar[Sequence[str]] = (
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "continue_final_message"),
        *("add_special_tokens", "return_token_strs", "required_prefix_token_ids"),
    )

    model: str = ""
    prompt: str | None = None
    messages: Objects
    tools: Objects
    #: A prompt ends where the model begins.
    add_generation_prompt: Literal[True] = True


def tokenize_request(body: JsonObject) -> AgentRequest | str:
    """vLLM's ``/tokenize``: the messages and tools of a request, or a text. Raises RequestError."""
    fields = _Tokenize.of(body)
    if fields.prompt is not None:
        return fields.prompt
    return ChatCompletions().read(fields.model_dump(include={"model", "messages", "tools"}), {})


def _message(message: JsonObject) -> JsonObject:
    if message.get("role") == "assistant":
        return message if message.get("content") is not None else message | {"content": ""}
    return message | {"content": one_text(message.get("content"))}


def _tool(tool: JsonObject, where: str) -> JsonObject:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError.field(where, f"got type {tool.get('type')!r:.80}, expected 'function'", "unsupported")
    return function_tool(function, f"{where}.function")


def _choice(request: AgentRequest, completion: AgentCompletion) -> JsonObject:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
        }
        for call in completion.tool_calls
    ]
    content = completion.content or (None if calls else "")
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    logprobs = None
    if completion.logprobs is not None:
        logprobs = {"content": logprob_items(completion.logprobs), "refusal": None}
        if request.tokens_as_ids:
            # NeMo Gym asks for them in training.
            message |= {
                PROMPT: list(completion.prompt_token_ids),
                GENERATION: list(completion.token_ids),
                LOG_PROBS: [token.logprob for token in completion.logprobs],
            }
    return {
        "index": 0,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        **({"token_ids": list(completion.token_ids)} if request.echo["ids"] else {}),
    }
