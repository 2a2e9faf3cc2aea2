"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gymdata.commands.record.dialects import dialect
from gymdata.commands.record.dialects._wire import (
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
from gymdata.commands.record.request import AgentCompletion, AgentRequest, CompletionDelta, RequestError
from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, JsonObject, field_at

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "seed"),
)
_STREAM_WITHOUT_EFFECT = ("include_obfuscation", "continuous_usage_stats")
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
        fields = Fields(body, without_effect=_WITHOUT_EFFECT, refused=_REFUSED)
        fields.refuse("modalities", unless=(["text"], []))
        fields.refuse("n", unless=(1,))
        messages = fields.listed("messages")
        tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.listed("tools"))]
        limits = [fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
        format = fields.section("response_format")
        wants_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 20)
        if top and not wants_logprobs:
            raise RequestError.field("top_logprobs", "needs logprobs: true")
        options = Fields(fields.section("stream_options"), "stream_options.", without_effect=_STREAM_WITHOUT_EFFECT)
        request = AgentRequest(
            model=fields.text("model") or "",
            messages=stored_messages(lambda: [_message(message) for message in messages]),
            tools=tools or None,
            tool_choice=openai_choice(
                fields.take("tool_choice", (str, dict), "text or an object"), "function.name", tools
            ),
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            sampling=fields.sampling(*_SAMPLING),
            max_tokens=next((limit for limit in limits if limit is not None), None),
            stop=fields.stop("stop"),
            stream=fields.flag("stream"),
            stream_usage=options.flag("include_usage"),
            response_format=response_format(
                format.get("type"), field_at(format, "json_schema.schema"), "response_format"
            ),
            logprobs=(top or 0) if wants_logprobs else None,
            return_token_ids=fields.flag("return_token_ids"),
            tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
            # OpenCode's, whose sub-agents have sessions of their own.
            conversation_hint="sub-agent" if headers.get("x-parent-session-id") else None,
        )
        options.refuse_rest()
        fields.refuse_rest()
        return request

    def response(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        body = _body(request, completion, [_choice_of(request, completion)], "chat.completion")
        return body | {"usage": _usage(completion)} | _prompt_ids(request, completion)

    async def events(self, request: AgentRequest, deltas: AsyncIterator[CompletionDelta]) -> AsyncIterator[bytes]:
        n_calls, begun = 0, False
        try:
            async for delta in deltas:
                parts: list[JsonObject] = [] if begun else [{"role": "assistant", "content": ""}]
                begun = True
                if delta.reasoning:
                    parts.append({"reasoning_content": delta.reasoning})
                if delta.content:
                    parts.append({"content": delta.content})
                for call in delta.tool_calls:
                    parts.append({"tool_calls": [{"index": n_calls, **_call(call)}]})
                    n_calls += 1
                for part in parts:
                    yield frame(_chunk(request, delta, [{**_UNENDED, "delta": part}]))
                if (end := delta.end) is not None:
                    last = _choice_of(request, end)
                    del last["message"]
                    yield frame(_chunk(request, delta, [last | {"delta": {}}]) | _prompt_ids(request, end))
                    if request.stream_usage:
                        yield frame(_chunk(request, delta, []) | {"usage": _usage(end)})
        except RequestError as error:
            yield frame(self.error_of(error))
        yield frame("[DONE]")


#: The choice of a part of a stream that is not its end, without its delta.
_UNENDED: JsonObject = {"index": 0, "logprobs": None, "finish_reason": None}


def _body(
    request: AgentRequest, source: CompletionDelta | AgentCompletion, choices: Sequence[JsonObject], kind: str
) -> JsonObject:
    return {
        "id": f"chatcmpl-{source.id}",
        "object": kind,
        "created": source.created,
        "model": request.model,
        "choices": choices,
    }


def _chunk(request: AgentRequest, delta: CompletionDelta, choices: Sequence[JsonObject]) -> JsonObject:
    """A part of a stream."""
    body = _body(request, delta, choices, "chat.completion.chunk")
    return body | ({"usage": None} if request.stream_usage else {})


def _usage(completion: AgentCompletion) -> JsonObject:
    prompt, generated = completion.n_prompt_tokens, completion.n_generated_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def tokenize_request(body: Body) -> AgentRequest | str:
    """vLLM's ``/tokenize``: the messages and tools of a request, or a text. Raises RequestError."""
    fields = Fields(body)
    fields.refuse("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "continue_final_message")
    fields.refuse("add_special_tokens", "return_token_strs", "required_prefix_token_ids")
    if not fields.flag("add_generation_prompt", True):
        raise RequestError.field(
            "add_generation_prompt", "got false: a prompt ends where the model begins", "unsupported"
        )
    if (prompt := fields.text("prompt")) is not None:
        fields.text("model")
        fields.refuse_rest()
        return prompt
    given = {name: fields.take(name, (str, list), "text or a list") for name in ("model", "messages", "tools")}
    fields.refuse_rest()
    return ChatCompletions().parse(given, {})


def _prompt_ids(request: AgentRequest, completion: AgentCompletion) -> JsonObject:
    return {"prompt_token_ids": list(completion.prompt_token_ids)} if request.return_token_ids else {}


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
        raise RequestError.field(where, f"got type {kind!r}, expected 'function'", "unsupported")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"), where)


def _call(call: Body) -> JsonObject:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
    }


def _choice_of(request: AgentRequest, completion: AgentCompletion) -> JsonObject:
    calls = [_call(call) for call in completion.tool_calls]
    content = completion.content or (None if calls else "")
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    logprobs = None
    if request.logprobs is not None and completion.logprobs is not None:
        logprobs = {"content": [logprob_items(token) for token in completion.logprobs], "refusal": None}
        if request.tokens_as_ids:
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
        **({"token_ids": list(completion.token_ids)} if request.return_token_ids else {}),
    }
