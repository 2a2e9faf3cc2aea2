"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gymdata.record.dialects import dialect
from gymdata.record.dialects._wire import (
    Body,
    Fields,
    OpenAI,
    arguments_text,
    frame,
    function_tool,
    logprob_items,
    one_text,
    openai_choice,
    response_format,
    stored_messages,
)
from gymdata.record.request import AgentCompletion, AgentRequest, CompletionDelta, RequestError
from gymdata.rollouts.messages import JsonObject, field_at

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "seed"),
)
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity"),
)
_REFUSED = (
    *("logit_bias", "functions", "function_call", "audio", "prediction", "web_search_options", "moderation"),
    *("chat_template", "chat_template_kwargs", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
)


@dialect("chat")
class ChatCompletions(OpenAI):
    """OpenAI's chat completions, with vLLM's ``return_token_ids`` and sampling parameters."""

    name = "chat"
    paths: tuple[str, ...] = ("/v1/chat/completions",)

    def parse(self, body: Body, headers: Mapping[str, str]) -> AgentRequest:
        fields = Fields(body)
        fields.without_effect(*_WITHOUT_EFFECT)
        fields.refuse(*_REFUSED)
        fields.refuse("modalities", unless=(["text"], []))
        messages = fields.listed("messages")
        tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.listed("tools"))]
        limits = [fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
        format = fields.section("response_format")
        wants_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 20)
        if top and not wants_logprobs:
            raise RequestError("invalid", "top_logprobs: needs logprobs: true", where="top_logprobs")
        options = Fields(fields.section("stream_options"), "stream_options.")
        options.without_effect("include_obfuscation", "continuous_usage_stats")
        request = AgentRequest(
            dialect=self.name,
            model=fields.text("model") or "",
            messages=stored_messages(lambda: [_message(message) for message in messages]),
            tools=tools or None,
            tool_choice=openai_choice(
                fields.take("tool_choice", (str, dict), "text or an object"), "function.name", tools
            ),
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            sampling=fields.sampling(*SAMPLING),
            max_tokens=next((limit for limit in limits if limit is not None), None),
            stop=fields.stop("stop"),
            n=fields.integer("n", 1, 128) or 1,
            stream=fields.flag("stream"),
            stream_usage=options.flag("include_usage"),
            response_format=response_format(
                format.get("type"), field_at(format, "json_schema.schema"), "response_format"
            ),
            logprobs=(top or 0) if wants_logprobs else None,
            return_token_ids=fields.flag("return_token_ids"),
            # OpenCode's, whose sub-agents have sessions of their own.
            conversation_hint="sub-agent" if headers.get("x-parent-session-id") else None,
        )
        options.refuse_rest()
        fields.refuse_rest()
        return request

    def response(self, request: AgentRequest, completions: Sequence[AgentCompletion]) -> JsonObject:
        first = completions[0]
        return {
            "id": f"chatcmpl-{first.id}",
            "object": "chat.completion",
            "created": first.created,
            "model": request.model,
            "choices": [_choice_of(request, completion) for completion in completions],
            "usage": usage(completions),
            **({"prompt_token_ids": list(first.prompt_token_ids)} if request.return_token_ids else {}),
        }

    async def events(self, request: AgentRequest, deltas: AsyncIterator[CompletionDelta]) -> AsyncIterator[bytes]:
        chunks, ended = _Chunks(request), list[AgentCompletion]()
        try:
            async for delta in deltas:
                for chunk in chunks.of(delta):
                    yield frame(chunk)
                if delta.end is not None:
                    ended.append(delta.end)
        except RequestError as error:
            yield frame(self.error_of(error))
        else:
            if request.stream_usage and ended:
                yield frame(chunks.chunk(ended[0], []) | {"usage": usage(ended)})
        yield frame("[DONE]")


class _Chunks:
    """The chunks of one stream."""

    def __init__(self, request: AgentRequest) -> None:
        self._request = request
        #: The number of calls that each completion has so far.
        self._calls: dict[int, int] = {}

    def chunk(self, source: CompletionDelta | AgentCompletion, choices: list[JsonObject]) -> JsonObject:
        return {
            "id": f"chatcmpl-{source.id}",
            "object": "chat.completion.chunk",
            "created": source.created,
            "model": self._request.model,
            "choices": choices,
            **({"usage": None} if self._request.stream_usage else {}),
        }

    def of(self, delta: CompletionDelta) -> list[JsonObject]:
        parts: list[JsonObject] = []
        if delta.index not in self._calls:
            self._calls[delta.index] = 0
            parts.append({"role": "assistant", "content": ""})
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning})
        if delta.content:
            parts.append({"content": delta.content})
        for call in delta.tool_calls:
            parts.append({"tool_calls": [{"index": self._calls[delta.index], **_call(call)}]})
            self._calls[delta.index] += 1
        choices: list[JsonObject] = [
            {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        chunks = [self.chunk(delta, [choice]) for choice in choices]
        if delta.end is not None:
            last = _choice_of(self._request, delta.end)
            del last["message"]
            ids = {"prompt_token_ids": list(delta.end.prompt_token_ids)} if self._request.return_token_ids else {}
            chunks.append(self.chunk(delta, [last | {"delta": {}}]) | ids)
        return chunks


def usage(completions: Sequence[AgentCompletion]) -> JsonObject:
    """The tokens of a request: its prompt, and all its completions."""
    prompt, generated = completions[0].n_prompt_tokens, sum(c.n_generated_tokens for c in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": completions[0].n_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(c.n_reasoning_tokens for c in completions)},
    }


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("role") == "assistant":
        return message if message.get("content") is not None else message | {"content": ""}
    return message | {"content": one_text(message.get("content"))}


def _tool(tool: Any, where: str) -> JsonObject:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError("unsupported", f"{where}: got type {kind!r}, expected 'function'", where=where)
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"), where)


def _call(call: Body) -> JsonObject:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
    }


def _choice_of(request: AgentRequest, completion: AgentCompletion) -> JsonObject:
    calls = [_call(call) for call in completion.tool_calls]
    message = {"role": "assistant", "content": completion.content or (None if calls else ""), "refusal": None}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    logprobs = None
    if request.logprobs is not None and completion.logprobs is not None:
        logprobs = {"content": [logprob_items(token) for token in completion.logprobs], "refusal": None}
    return {
        "index": completion.index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        **({"token_ids": list(completion.token_ids)} if request.return_token_ids else {}),
    }
