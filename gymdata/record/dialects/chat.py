"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymdata.record.dialects import dialect
from gymdata.record.dialects._wire import (
    Body,
    Choices,
    Fields,
    arguments_text,
    function_tool,
    logprob_items,
    one_text,
    openai_choice,
    response_format,
    stored_messages,
    usage,
)
from gymdata.record.request import AgentCompletion, AgentRequest, CompletionDelta, RequestError
from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, JsonObject, field_at

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "seed"),
)
STREAM_WITHOUT_EFFECT = ("include_obfuscation", "continuous_usage_stats")
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity"),
)
_REFUSED = (
    *("logit_bias", "functions", "function_call", "audio", "prediction", "web_search_options", "moderation"),
    *("chat_template", "chat_template_kwargs", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
)


@dialect("chat")
class ChatCompletions(Choices):
    """OpenAI's chat completions, with vLLM's ``return_token_ids`` and sampling parameters."""

    name, id_prefix, objects = "chat", "chatcmpl", ("chat.completion", "chat.completion.chunk")
    paths: tuple[str, ...] = ("/v1/chat/completions",)

    def parse(self, body: Body, headers: Mapping[str, str]) -> AgentRequest:
        fields = Fields(body, without_effect=_WITHOUT_EFFECT, refused=_REFUSED)
        fields.refuse("modalities", unless=(["text"], []))
        messages = fields.listed("messages")
        tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.listed("tools"))]
        limits = [fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
        format = fields.section("response_format")
        wants_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 20)
        if top and not wants_logprobs:
            raise RequestError.field("top_logprobs", "needs logprobs: true")
        options = Fields(fields.section("stream_options"), "stream_options.", without_effect=STREAM_WITHOUT_EFFECT)
        request = AgentRequest(
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
            tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
            # OpenCode's, whose sub-agents have sessions of their own.
            conversation_hint="sub-agent" if headers.get("x-parent-session-id") else None,
        )
        options.refuse_rest()
        fields.refuse_rest()
        return request

    def response(self, request: AgentRequest, completions: Sequence[AgentCompletion]) -> JsonObject:
        choices = [_choice_of(request, completion) for completion in completions]
        body = self.body(request, completions[0], choices) | {"usage": usage(completions)}
        return body | _prompt_ids(request, completions[0])

    def chunks(self, request: AgentRequest) -> Callable[[CompletionDelta], Sequence[JsonObject]]:
        #: The number of calls that each completion has so far.
        calls: dict[int, int] = {}

        def of(delta: CompletionDelta) -> Sequence[JsonObject]:
            parts: list[JsonObject] = []
            if delta.index not in calls:
                calls[delta.index] = 0
                parts.append({"role": "assistant", "content": ""})
            if delta.reasoning:
                parts.append({"reasoning_content": delta.reasoning})
            if delta.content:
                parts.append({"content": delta.content})
            for call in delta.tool_calls:
                parts.append({"tool_calls": [{"index": calls[delta.index], **_call(call)}]})
                calls[delta.index] += 1
            beside = {"logprobs": None, "finish_reason": None}
            choices: list[JsonObject] = [{"index": delta.index, "delta": part, **beside} for part in parts]
            chunks = [self.body(request, delta, [choice], chunk=True) for choice in choices]
            if delta.end is not None:
                last = _choice_of(request, delta.end)
                del last["message"]
                body = self.body(request, delta, [last | {"delta": {}}], chunk=True)
                chunks.append(body | _prompt_ids(request, delta.end))
            return chunks

        return of


def tokenize_request(body: Body) -> AgentRequest:
    """vLLM's ``/tokenize``: the messages and tools of a request, or a text. Raises RequestError."""
    fields = Fields(body)
    fields.refuse("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "continue_final_message")
    fields.refuse("add_special_tokens", "return_token_strs", "required_prefix_token_ids")
    if not fields.flag("add_generation_prompt", True):
        raise RequestError.field(
            "add_generation_prompt", "got false: a prompt ends where the model begins", "unsupported"
        )
    if (prompt := fields.text("prompt")) is not None:
        request = AgentRequest(model=fields.text("model") or "", messages=[], prompt=prompt)
    else:
        given = {name: fields.take(name, (str, list), "text or a list") for name in ("model", "messages", "tools")}
        request = ChatCompletions().parse(given, {})
    fields.refuse_rest()
    return request


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
        "index": completion.index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        **({"token_ids": list(completion.token_ids)} if request.return_token_ids else {}),
    }
