"""What the dialects share: bodies of requests, messages in the form that rollouts store, frames of a stream, and the errors
of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import orjson
import pydantic

from gymdata.commands.record.body import Body
from gymdata.commands.record.request import AgentRequest, ErrorKind, RequestError, TokenLogprob
from gymdata.formats.conversion.importing import ODD, BadItem, reason_of
from gymdata.formats.text.rows import conversation
from gymdata.rollouts.messages import JsonObject, Message, field_at, json_text, loads, storable
from gymdata.texts import brief, choices

Objects = Annotated[list[JsonObject], pydantic.Field(default_factory=list)]
Object = Annotated[JsonObject, pydantic.Field(default_factory=dict)]
Limit = Annotated[int | None, pydantic.Field(ge=1)]
Share = Annotated[float | None, pydantic.Field(ge=0, le=1)]
Stop = Annotated[
    list[Annotated[str, pydantic.Field(min_length=1)]],
    pydantic.BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    pydantic.Field(default_factory=list),
]
_FORMATS = ("text", "json_object", "json_schema")


class Completing(Body):
    """What the requests of all dialects have."""

    model: str = ""
    tools: Objects
    stream: bool = False
    temperature: Annotated[float | None, pydantic.Field(ge=0, le=2)] = None
    top_p: Share = None


def select(body: JsonObject, *names: str) -> JsonObject:
    """Those of these fields that have a value, as the client wrote it."""
    return {name: body[name] for name in names if body.get(name) is not None}


def one_text(content: Any) -> Any:
    """Parts of text that are not the model's as one part, a line each, as vLLM gives them to templates; other parts stay."""
    if not isinstance(content, list):
        return content
    is_text = [isinstance(p, dict) and "text" in str(p.get("type")) and isinstance(p.get("text"), str) for p in content]
    texts = [part["text"] for part, is_one in zip(content, is_text, strict=True) if is_one]
    other_parts = [part for part, is_one in zip(content, is_text, strict=True) if not is_one]
    return [*other_parts, {"type": "text", "text": "\n".join(texts)}] if texts else other_parts


def reminder(text: str) -> str:
    """A system message that comes after others, which most chat templates refuse, as the user says it."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def stored_messages(read: Callable[[], Sequence[JsonObject]]) -> list[Message]:
    """The chat messages that ``read`` returns, as rollouts store them: one system message at most, and that first. Raises
    RequestError."""
    try:
        messages = [_stored(message) for message in conversation(list(read()), "messages")]
    except BadItem as error:
        raise RequestError("invalid", error.reason, where=error.reason.partition(":")[0]) from error
    except ODD as error:
        raise RequestError.field("messages", reason_of(error)) from error
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system = "\n\n".join(message["content"] for message in messages[:first] if message["content"])
    later = [
        {"role": "user", "content": reminder(message["content"])} if message["role"] == "system" else message
        for message in messages[first:]
    ]
    return [{"role": "system", "content": system}, *later] if system else later


def _stored(row: Message) -> Message:
    fields = ("role", "content", "reasoning", "tool_call_id", "name")
    message = {name: row[name] for name in fields if row[name] is not None} | {"content": row["content"] or ""}
    if calls := loads(row["tool_calls"]):
        for call in calls:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str) and isinstance(parsed := loads(arguments or "{}"), dict) and storable(parsed):
                call["function"]["arguments"] = parsed
        message["tool_calls"] = calls
    return message


def own_tools(
    tools: Sequence[JsonObject],
    hosted: tuple[str, ...],
    servers: str,
    read: Callable[[JsonObject, str], Iterable[JsonObject]],
) -> list[JsonObject]:
    """The client's tools, of which ``read`` reads one at its place. Those whose types begin as ``hosted`` are run by the
    API's servers, and are left out beside others, for a model is free not to call them."""
    own: list[JsonObject] = []
    alone = None
    for n, tool in enumerate(tools):
        where, kind = f"tools[{n}]", tool.get("type")
        if str(kind).startswith(hosted):
            alone = alone or RequestError.field(f"{where}.type", f"{kind!r} needs {servers}'s servers", "unsupported")
        else:
            own += read(tool, where)
    if alone is not None and not own:
        raise alone
    return own


def function_tool(tool: JsonObject, where: str, schema: str = "parameters") -> JsonObject:
    """A tool's definition as chat templates get it. ``schema``: the field that has it."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError.field(f"{where}.name", f"got {name!r:.80}, expected text")
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get(schema)}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named_tool(name: Any, tools: Sequence[JsonObject], where: str) -> Mapping[str, str]:
    """The choice of the tool ``name``. Raises RequestError when no tool has it."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError.field(where, f"got {brief(name)}, expected one of {choices(str(name), names)}")
    return {"name": name}


def openai_choice(choice: Any, name: str, tools: Sequence[JsonObject]) -> str | Mapping[str, str]:
    """``tool_choice`` of OpenAI's APIs. ``name``: the field of a function's choice that has its name."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, dict) and choice.get("type") == "function":
        return named_tool(field_at(choice, name), tools, f"tool_choice.{name}")
    if choice == "required" and not tools:
        raise RequestError.field("tool_choice", "'required' needs tools")
    if choice not in ("auto", "none", "required"):
        problem = f"got {choice!r:.80}, expected auto, none, required or a function"
        raise RequestError.field("tool_choice", problem, "unsupported")
    return str(choice)


def response_format(name: Any, schema: Any, where: str) -> JsonObject | None:
    """The format of a response; None for text."""
    if name not in (None, *_FORMATS):
        problem = f"got {name!r:.80}, expected one of {', '.join(_FORMATS)}"
        raise RequestError.field(f"{where}.type", problem, "unsupported")
    if name == "json_schema" and not isinstance(schema, dict):
        raise RequestError.field(where, "has no schema, which type json_schema needs")
    return None if name in (None, "text") else {"type": name, **({"schema": schema} if name == "json_schema" else {})}


def arguments_text(call: JsonObject) -> str:
    """A call's arguments as JSON text; text that is not JSON stays as the model wrote it."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json_text(arguments)


def frame(data: JsonObject | str, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = data.encode() if isinstance(data, str) else orjson.dumps(data)
    return b"%bdata: %b\n\n" % (f"event: {event}\n".encode() if event else b"", text)


_OPENAI: Mapping[ErrorKind, tuple[str, str]] = {
    "invalid": ("invalid_request_error", "invalid_value"),
    "unsupported": ("invalid_request_error", "unsupported_parameter"),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "budget": ("insufficient_quota", "insufficient_quota"),
    "busy": ("rate_limit_error", "rate_limit_exceeded"),
    "upstream": ("server_error", "upstream_error"),
    "internal": ("server_error", "server_error"),
}


class OpenAI:
    """What OpenAI's APIs have in common."""

    count_paths: Sequence[str] = ()

    def counted(self, request: AgentRequest, n_tokens: int) -> JsonObject:  # noqa: ARG002 - the port's signature
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    def error(self, error: RequestError) -> JsonObject:
        type_, code = _OPENAI[error.kind]
        return {"error": {"message": error.message, "type": type_, "param": error.where, "code": code}}


def logprob_items(logprobs: Sequence[TokenLogprob]) -> list[JsonObject]:
    """Tokens with their log-probabilities and alternatives, as chat completions and responses have them."""

    def item(token: str, logprob: float) -> JsonObject:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    return [
        item(token, logprob) | {"top_logprobs": [item(*other) for other in top]} for token, logprob, top in logprobs
    ]
