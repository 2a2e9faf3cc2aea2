"""Reading an assistant message from generated ids: content, reasoning and tool calls.

Invariants: no text makes a reader raise; what does not parse is content; special tokens never reach content; the
same ids always give the same message, tool call ids included. The parsing itself is transformers', TRL's or vLLM's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import xxhash

from gymdata.errors import UsageError, needs
from gymdata.rollouts.messages import Message, ToolCall, Tools

_log = logging.getLogger(__name__)


class TemplateChat(Protocol):
    """The parts of a tokenizer with its chat template that parsers need
    (``gymdata.chat.template.TransformersChat``)."""

    tokenizer: Any
    served_template: str
    generation_prompt: str
    stop_token_ids: tuple[int, ...]
    end_of_turn_ids: tuple[int, ...]

    def plain_text(self, token_ids: Sequence[int], *, special: bool) -> str: ...

    def without_special(self, text: str) -> str: ...

    def written_by_template(self, message: Message, tools: Tools) -> list[int] | None: ...


class ResponseReader(Protocol):
    """One way to read a message. ``name`` goes to run.json."""

    name: str

    def read(self, ids: list[int], tools: Tools) -> Message:
        """``ids``: as generated, with or without a stop token at the end."""
        ...


class PlainParser:
    """All text is content."""

    name = "none"

    def __init__(self, chat: TemplateChat) -> None:
        self._chat = chat

    def read(self, ids: list[int], tools: Tools) -> Message:  # noqa: ARG002 - the port's signature
        return {"role": "assistant", "content": self._chat.plain_text(ids, special=False)}


class TemplateParser:
    """transformers' ``parse_response`` with a response template: the tokenizer's own, or one that TRL ships."""

    def __init__(self, chat: TemplateChat, name: str, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = name
        self._chat = chat
        self._template = load_response_template(dict(template))
        self._plain = PlainParser(chat)

    def read(self, ids: list[int], tools: Tools) -> Message:
        from transformers.utils.chat_parsing.response_parser import parse_response

        completion, closing = _split_stop(ids, self._chat)
        text = self._chat.plain_text([*completion, closing], special=True)
        try:
            parsed = parse_response(
                text,
                self._template,
                prefix=self._chat.generation_prompt,
                tools=[dict(t) for t in tools] if tools else None,
            )
            return _message(parsed, completion, self._chat)
        except Exception as error:  # noqa: BLE001 - a model writes anything, and the parser promises nothing
            _log.debug("not parsed (%s): %r", error, text)
            return self._plain.read(ids, tools)


class VllmToolParser:
    """One of vLLM's tool parsers, by name. It reads calls; reasoning between think tags is cut before."""

    def __init__(self, chat: TemplateChat, name: str) -> None:
        with needs("engine"):
            from vllm.tool_parsers import ToolParserManager
        try:
            parser = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            raise UsageError.unknown_choice(
                "--tool-parser", name, ["auto", "none", *ToolParserManager.list_registered()]
            ) from error
        self.name = f"vllm:{name}"
        self._chat = chat
        self._parser = parser
        self._plain = PlainParser(chat)

    def read(self, ids: list[int], tools: Tools) -> Message:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        completion, _ = _split_stop(ids, self._chat)
        text = self._chat.plain_text(completion, special=True)
        opened = self._chat.generation_prompt.rstrip().endswith("<think>")
        try:
            reasoning, text = _split_reasoning(text, opened)
            body = {"messages": [], "tools": [dict(t) for t in tools or []] or None}
            request = ChatCompletionRequest.model_validate(body)
            parser: Any = self._parser
            found = parser(self._chat.tokenizer, request.tools).extract_tool_calls(text, request)
            calls = [c.model_dump() for c in found.tool_calls] if found.tools_called else []
            content = found.content or ""
            parsed = {"content": content, "reasoning": reasoning, "tool_calls": calls}
            return _message(parsed, completion, self._chat)
        except Exception as error:  # noqa: BLE001 - a model writes anything, and the parser promises nothing
            _log.debug("not parsed (%s): %r", error, text)
            return self._plain.read(ids, tools)


def choose_parser(chat: TemplateChat, wanted: str) -> ResponseReader:
    """``wanted``: "none", the name of a vLLM parser, or "auto": the tokenizer's own response template, else the one that
    TRL knows for this chat template, else one of TRL's that reads back what this template writes, else none."""
    if wanted == "none":
        return PlainParser(chat)
    if wanted != "auto":
        return VllmToolParser(chat, wanted)
    own = getattr(chat.tokenizer, "response_template", None)
    if own is not None:
        return TemplateParser(chat, "response_template", own)
    named, known = _trl_templates(chat)
    for name, template in known:
        try:
            candidate = TemplateParser(chat, name, template)
        except (ValueError, TypeError, KeyError):
            continue
        if template is named or _reads_back(chat, candidate):
            return candidate
    return PlainParser(chat)


def _trl_templates(
    chat: TemplateChat,
) -> tuple[Mapping[str, Any] | None, list[tuple[str, Mapping[str, Any]]]]:
    """(the response template that TRL names for this chat template, all that it ships, that one first)."""
    try:
        from trl import chat_template_utils as trl
    except ImportError:
        return None, []
    known: list[tuple[str, Mapping[str, Any]]] = [
        (f"trl:{name.removesuffix('_template')}", value)
        for name, value in sorted(vars(trl).items())
        if name.endswith("_template") and isinstance(value, dict) and "fields" in value
    ]
    tokenizer, used = chat.tokenizer, chat.tokenizer.chat_template
    try:
        tokenizer.chat_template = chat.served_template  # TRL knows templates as they are published
        trl.add_response_schema(tokenizer)
        named = tokenizer.response_template
        tokenizer.response_template = None
    except (ValueError, AttributeError):
        return None, known
    finally:
        tokenizer.chat_template = used
    return named, sorted(known, key=lambda item: item[1] is not named)


def _reads_back(chat: TemplateChat, parser: ResponseReader) -> bool:
    """Whether the parser finds again the call that the chat template writes, and leaves plain text alone."""
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"word": "tree", "n": 3}},
    }
    schema = {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": schema}}
    written = chat.written_by_template({"role": "assistant", "content": "", "tool_calls": [call]}, [tool])
    if written is None:
        return False
    message = parser.read(written, [tool])
    calls = [c["function"] for c in message.get("tool_calls") or []]
    plain = chat.written_by_template({"role": "assistant", "content": "just text"}, None)
    text = parser.read(plain, None) if plain is not None else {}
    return calls == [call["function"]] and str(text.get("content", "")).strip() == "just text"


def _message(parsed: Mapping[str, Any] | None, ids: Sequence[int], chat: TemplateChat) -> Message:
    """A parser's dict in our shape. Raises ValueError when a tool call in it is unusable."""
    if not isinstance(parsed, Mapping):
        raise ValueError("nothing was parsed")
    content = parsed.get("content")
    message: Message = {"role": "assistant", "content": chat.without_special(content) if content else ""}
    reasoning = next((parsed[k] for k in ("reasoning", "reasoning_content", "thinking") if parsed.get(k)), None)
    if reasoning and str(reasoning).strip():
        message["reasoning"] = chat.without_special(str(reasoning)).strip("\n")
    calls = [_call(c, i, ids) for i, c in enumerate(parsed.get("tool_calls") or [])]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: Any, index: int, ids: Sequence[int]) -> ToolCall:
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"not a tool call: {call!r}")
    # Nine letters and digits, which is what the strictest template accepts; a function of the ids, so that it repeats.
    seed = xxhash.xxh3_64_hexdigest(repr((index, list(ids))).encode())
    return {"id": f"c{seed[:8]}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _split_stop(ids: list[int], chat: TemplateChat) -> tuple[list[int], int]:
    """(the completion, the token that closes it): a response template wants to see a turn closed, even one cut short."""
    if ids and ids[-1] in chat.stop_token_ids:
        return ids[:-1], ids[-1] if ids[-1] in chat.end_of_turn_ids else chat.end_of_turn_ids[0]
    return ids, chat.end_of_turn_ids[0]


def _split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    start, _, rest = text.partition("<think>")
    if rest and not start.strip():
        text, opened = rest, True
    if not opened or "</think>" not in text:
        return None, start + rest if not opened else text
    reasoning, _, content = text.partition("</think>")
    return reasoning, content.lstrip("\n")
