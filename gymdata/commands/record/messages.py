"""When a message that a client sends is one that its session holds already: the same message in other words.

Clients send the whole conversation with each request, and rewrite what the model said on the way. A message is the same when
it is equal after this:

- white space at the ends of any message is left out, line ends are ``\\n``; in the model's own messages every run of white
  space counts as one space;
- no content, empty content and null are the same;
- reasoning that a client leaves out was left out by the client; reasoning that it sends must be the model's;
- arguments of calls are compared as values, objects and JSON texts alike, so neither the order of keys nor white space
  counts; numbers are JavaScript's, 64-bit floats without a negative zero (``12.0`` is ``12``, ``1e3`` is ``1000``);
- ids of calls are compared by the call that they name: the first call of a conversation is the first one, whatever its id;
- ``name`` is part of a message. It does not count where it repeats the call's on a tool's result, nor on what this session
  sampled, whose ids no name is part of;
- every other key does not count.

Content in parts is text before it comes here (``gymdata.commands.record.request``). Anything else is another message.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence

import orjson

from gymdata.rollouts.messages import SPELLED_CALL, Message, ToolCall, Tools, loads, storable

_SPACE = re.compile(r"\s+")
_SPELLED = re.compile(SPELLED_CALL)


class Calls:
    """The calls of one conversation in order, by the ids that its messages have."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.names: list[str] = []
        self._by_id: dict[str, int] = {}

    def add(self, call: ToolCall) -> None:
        """One more call."""
        call_id = str(call.get("id"))
        self._by_id[call_id] = len(self.ids)
        self.ids.append(call_id)
        self.names.append(call["function"]["name"])

    def number(self, call_id: object) -> int | None:
        """Which call an id names (the latest that has it); None for an id of none."""
        return self._by_id.get(str(call_id))

    def copy(self) -> Calls:
        """The same calls, to go on with."""
        copy = Calls()
        copy.ids, copy.names, copy._by_id = [*self.ids], [*self.names], dict(self._by_id)
        return copy


def digests(messages: Sequence[Message], start: bytes, calls: Calls | None = None) -> Iterator[bytes]:
    """A digest of ``start`` and the messages up to and with each one: equal where all of them are the same messages, but for
    reasoning and names of the assistant's: see ``same_assistant``. ``calls``: of the messages before, to which those of
    ``messages`` are added."""
    calls, digest = Calls() if calls is None else calls, start
    for message in messages:
        digest = hashlib.blake2b(digest + orjson.dumps(_canonical(message, calls)), digest_size=16).digest()
        yield digest


def digest_of(message: Message) -> bytes:
    """The digest of a message alone."""
    return next(digests([message], b""))


def same_assistant(sent: Message, recorded: Message, turn: int | None) -> bool:
    """Whether a client's version of an assistant's message leaves the reasoning out, or has the recorded one, and has the
    same name unless it was sampled, at ``turn``."""
    reasoning = _SPACE.sub(" ", sent.get("reasoning") or "").strip()
    same_name = turn is not None or (sent.get("name") or None) == (recorded.get("name") or None)
    return same_name and reasoning in ("", _SPACE.sub(" ", recorded.get("reasoning") or "").strip())


def with_recorded_ids(new: Sequence[Message], sent: Sequence[Message], recorded: Sequence[Message]) -> list[Message]:
    """``new`` messages with the ids that the recorded calls have in place of those that the client gave them. ``sent``: what
    the client sent of the conversation that is ``recorded``."""
    sent_calls, recorded_calls = Calls(), Calls()
    for messages, calls in ((sent, sent_calls), (recorded, recorded_calls)):
        for message in messages:
            for call in message.get("tool_calls") or ():
                calls.add(call)
    result = []
    for message in new:
        number = sent_calls.number(message.get("tool_call_id"))
        if number is not None and number < len(recorded_calls.ids):
            message = {**message, "tool_call_id": recorded_calls.ids[number]}
        for call in message.get("tool_calls") or ():
            sent_calls.add(call)
            recorded_calls.add(call)
        result.append(message)
    return result


def spells_call(message: Message) -> bool:
    """Whether the text has the markup of a call that did not parse."""
    return not message.get("tool_calls") and _SPELLED.search(message.get("content") or "") is not None


def fingerprint(messages: Sequence[Message], tools: Tools) -> str:
    """Six hex digits for the system prompt and the tool set of an agent."""
    system = [_plain(m.get("content")) for m in messages if m["role"] == "system"]
    return hashlib.blake2b(orjson.dumps(system) + tools_digest(tools), digest_size=3).hexdigest()


def tools_digest(tools: Tools) -> bytes:
    """Equal for equal definitions in the same order, which is how a template writes them."""
    text = orjson.dumps([dict(tool) for tool in tools or ()], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).digest()


def _canonical(message: Message, calls: Calls) -> list[object]:
    called = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.add(call)
        arguments = _value(function.get("arguments"))
        called.append([function["name"], orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()])
    content = _plain(message.get("content"))
    if message["role"] == "assistant":
        content = _SPACE.sub(" ", content)
    number = calls.number(message["tool_call_id"]) if message.get("tool_call_id") else None
    name = message.get("name") or None
    if message["role"] == "assistant" or (number is not None and name == calls.names[number]):
        name = None
    return [message["role"], content, called, number, name]


def _value(arguments: object) -> object:
    """Arguments of a call, an object or its JSON text, with numbers as JavaScript has them."""
    parsed = loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, dict):
        return arguments
    with contextlib.suppress(RecursionError):
        value = _numbers(parsed)
        if storable(value):
            return value
    return arguments


def _numbers(value: object) -> object:
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value) + 0.0  # a negative zero becomes zero
        return str(value)
    return value


def _plain(content: object) -> str:
    return str(content or "").replace("\r\n", "\n").strip()
