"""What the dialects share: fields of a body, messages in the form that rollouts store, frames of a stream, and the errors
of OpenAI's APIs.

Invariant: every field of a body is read, has no effect on what a model writes, or is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from gymdata.commands.record.request import ErrorKind, RequestError
from gymdata.formats.conversion.importing import ODD, BadItem, reason_of
from gymdata.formats.text.rows import conversation
from gymdata.rollouts.messages import JsonObject, Message, field_at, json_text, loads, storable
from gymdata.texts import brief, choices

T = TypeVar("T")
Body = Mapping[str, Any]
#: Least and greatest values of the sampling parameters, by vLLM's names.
_SAMPLING: Mapping[str, tuple[type[int] | type[float], float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, math.inf),
    "min_p": (float, 0, 1),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "repetition_penalty": (float, 0, math.inf),
    "min_tokens": (int, 0, math.inf),
    "seed": (int, -math.inf, math.inf),
}
_FORMATS = ("text", "json_object", "json_schema")


class Fields:
    """The fields of a body that have a value. Each is taken once; ``refuse_rest`` refuses what is left.

    ``without_effect``: those that change nothing that the model writes: accounts, caches, storage, advice on effort;
    ``refused``: see ``refuse``."""

    def __init__(
        self, body: Body, where: str = "", *, without_effect: Sequence[str] = (), refused: Sequence[str] = ()
    ) -> None:
        self._left = {k: v for k, v in body.items() if v is not None and k not in without_effect}
        self._where = where
        self.refuse(*refused)

    def take(self, name: str, kind: type[T] | tuple[type[T], ...], expected: str) -> T | None:
        """The field's value, None where it has none. Raises RequestError when it is of another type."""
        value: T | None = self._left.pop(name, None)
        wrong = isinstance(value, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))
        if value is not None and (wrong or not isinstance(value, kind)):
            raise self._invalid(name, value, expected)
        return value

    def text(self, name: str) -> str | None:
        return self.take(name, str, "text")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, bool, "true or false")
        return default if value is None else value

    def section(self, name: str) -> JsonObject:
        return self.take(name, dict, "an object") or {}

    def listed(self, name: str) -> list[Any]:
        return self.take(name, list, "a list") or []

    def integer(self, name: str, least: float, most: float = math.inf) -> int | None:
        value: int | None = self._number(name, int, least, most)
        return value

    def sampling(self, *names: str) -> JsonObject:
        """Those of these sampling parameters that have a value."""
        values = {name: self._number(name, *_SAMPLING[name]) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def stop(self, name: str) -> tuple[str, ...]:
        value: Any = self.take(name, (str, list), "text or a list of texts")
        texts = [value] if isinstance(value, str) else value or []
        if not all(isinstance(text, str) and text for text in texts):
            raise self._invalid(name, value, "text or a list of texts")
        return tuple(texts)

    def refuse(self, *names: str, unless: Sequence[Any] = (False, "", [], {})) -> None:
        """Refuse these where they ask for something. ``unless``: values that do not."""
        for name in names:
            if self._left.pop(name, None) not in (None, *unless):
                raise RequestError.field(self._where + name, "not supported by gymdata record", "unsupported")

    def refuse_rest(self) -> None:
        if name := next(iter(self._left), None):
            raise RequestError.field(self._where + name, "unknown parameter; leave it out", "unsupported")

    def _number(self, name: str, kind: type, least: float, most: float) -> Any:
        bounds = f" from {least:g}" * (least > -math.inf) + f" to {most:g}" * (most < math.inf)
        expected = ("an integer" if kind is int else "a number") + bounds
        value: Any = self.take(name, kind if kind is int else (int, float), expected)
        if value is not None and not least <= value <= most:
            raise self._invalid(name, value, expected)
        return value

    def _invalid(self, name: str, value: Any, expected: str) -> RequestError:
        return RequestError.field(self._where + name, f"got {value!r:.80}, expected {expected}")


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


def stored_messages(read: Callable[[], Sequence[Body]]) -> list[Message]:
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


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> JsonObject:
    """A tool's definition as chat templates get it."""
    if not isinstance(name, str) or not name:
        raise RequestError.field(f"{where}.name", f"got {name!r}, expected text")
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named_tool(name: Any, tools: Sequence[Body], where: str) -> Mapping[str, str]:
    """The choice of the tool ``name``. Raises RequestError when no tool has it."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError.field(where, f"got {brief(name)}, expected one of {choices(str(name), names)}")
    return {"name": name}


def openai_choice(choice: Any, name: str, tools: Sequence[Body]) -> str | Mapping[str, str]:
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
        raise RequestError(
            "unsupported", f"{where}.type: got {name!r}, expected one of {', '.join(_FORMATS)}", where=where
        )
    if name == "json_schema" and not isinstance(schema, dict):
        raise RequestError.field(where, "has no schema, which type json_schema needs")
    return None if name in (None, "text") else {"type": name, **({"schema": schema} if name == "json_schema" else {})}


def arguments_text(call: Body) -> str:
    """A call's arguments as JSON text; text that is not JSON stays as the model wrote it."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json_text(arguments)


def frame(data: Body | str, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = data.encode() if isinstance(data, str) else orjson.dumps(data)
    return b"%bdata: %b\n\n" % (f"event: {event}\n".encode() if event else b"", text)


def retry_header(retry_after: float | None) -> dict[str, str]:
    return {} if retry_after is None else {"retry-after": str(math.ceil(retry_after))}


_OPENAI: Mapping[ErrorKind, tuple[str, str | None]] = {
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

    count_paths: tuple[str, ...] = ()

    def counted(self, request: object, n_tokens: int) -> JsonObject:  # noqa: ARG002 - the port's signature
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    def error(
        self, status: int, kind: ErrorKind, message: str, retry_after: float | None = None, where: str | None = None
    ) -> tuple[int, dict[str, str], JsonObject]:
        type_, code = _OPENAI[kind]
        error = {"message": message, "type": type_, "param": where, "code": code}
        return status, retry_header(retry_after), {"error": error}

    def error_of(self, error: RequestError) -> JsonObject:
        """The body of an error, for a stream."""
        return self.error(error.status, error.kind, error.message, error.retry_after, error.where)[2]


def logprob_items(token: Any) -> JsonObject:
    """A token with its log-probability and alternatives, as chat completions and responses have them."""
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in token.top]
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": list(token.token.encode()),
        "top_logprobs": top,
    }
