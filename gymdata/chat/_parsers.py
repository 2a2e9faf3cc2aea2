"""Reading an assistant message from generated ids: content, reasoning and tool calls.

Invariants: no text makes a reader raise; what does not parse is content; special tokens never reach content; the
same ids always give the same message, tool call ids included. The parsing itself is transformers', TRL's or vLLM's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import xxhash

from gymdata.errors import UsageError, needs
from gymdata.rollouts.messages import Message, ToolCall, Tools, storable

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

    def read(self, ids: list[int], tools: Tools, *, calls: bool = True) -> Message:
        """``ids``: as generated, with or without a stop token at the end. Without ``calls`` they stay text."""
        ...


def _trimmed(text: str, chat: TemplateChat, *, stripped: bool) -> str:
    """Text without special tokens, and without the white space at its ends where it is ``stripped``."""
    return chat.without_special(text.rstrip()).lstrip() if stripped else chat.without_special(text)


class PlainParser:
    """All text is content."""

    name = "none"

    def __init__(self, chat: TemplateChat) -> None:
        self._chat = chat

    def read(self, ids: list[int], tools: Tools, *, calls: bool = True) -> Message:  # noqa: ARG002 - the port's signature
        return {"role": "assistant", "content": self._chat.plain_text(ids, special=False)}


class TemplateParser:
    """transformers' parser with a response template: the tokenizer's own, or one that TRL ships."""

    def __init__(self, chat: TemplateChat, name: str, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = name
        self._chat = chat
        self._template = load_response_template(dict(template))
        self._plain = PlainParser(chat)

    def read(self, ids: list[int], tools: Tools, *, calls: bool = True) -> Message:
        completion, closing = _split_stop(ids, self._chat)
        text = self._chat.plain_text([*completion, closing], special=True)
        try:
            reading = _TemplateText(self._chat, self._template, tools)
            reading.feed(text)
            message = _message(reading.end(), completion, self._chat)
            if calls or "tool_calls" not in message:
                return message
        except Exception as error:  # noqa: BLE001 - a model writes anything, and the parser promises nothing
            _log.debug("not parsed (%s): %r", error, text)
        return self._with_calls_as_text(text, ids, tools)

    def _with_calls_as_text(self, text: str, ids: list[int], tools: Tools) -> Message:
        """What comes before the first call as it is parsed, and the rest as content."""
        for begins in sorted(
            match.span()
            for field in self._template.fields.values()
            if field.open_re is not None and not _is_text(field)
            for match in field.open_re.finditer(text)
        ):
            reading = _TemplateText(self._chat, self._template, tools)
            reading.feed(text[: begins[1] + 1])
            if reading.certain:
                continue
            reading = _TemplateText(self._chat, self._template, tools)
            before = text[: begins[0]]
            reading.feed(before)
            reading.end()
            content, reasoning = reading.texts["content"], reading.texts["reasoning"]
            rest = self._chat.without_special(text[begins[0] :])
            if content or reasoning:
                content += before[len(before.rstrip()) :] if content else ""
                return _message({"content": content + rest, "reasoning": reasoning}, ids, self._chat)
            break
        return self._plain.read(ids, tools)


class _TemplateText:
    """The regions of a message that are plain text. ``certain``: nothing has begun that may turn out not to parse, by which
    all that follows would be content."""

    def __init__(self, chat: TemplateChat, template: Any, tools: Tools) -> None:
        from transformers.utils.chat_parsing.response_parser import ResponseParser

        self._chat, self._fields = chat, template.fields
        self._parser: Any = ResponseParser(
            template, prefix=chat.generation_prompt, tools=[dict(t) for t in tools] if tools else None
        )
        self.certain = True
        self.texts = {"reasoning": "", "content": ""}
        #: The text of the open regions, and whether each is stripped.
        self._open: dict[str, str] = {}
        self._stripped: dict[str, bool] = {}
        self._take(self._parser.initial_events)

    def feed(self, text: str) -> None:
        self._take(self._parser.feed(text))

    def end(self) -> dict[str, Any]:
        """The parser's message, with all text of a kind. Raises ValueError."""
        parsed, events = self._parser.finalize()
        self._take(events)
        for name in list(self._open):
            self._close(name)
        for name, field in self._fields.items():
            if name in _TEXTS and _is_text(field):
                parsed[name] = self.texts[_TEXTS[name]]
        return dict(parsed)

    def _take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            kind, field = event["type"], self._fields[event["field"]]
            name = _TEXTS.get(field.name)
            if name is None or not _is_text(field):
                self.certain = False
            elif kind == "region_open":
                # A later region of the kind is a paragraph of its own.
                self._open[name], self._stripped[name] = "", field.content_args.get("strip", True)
            elif kind == "region_close":
                self._close(name)
            else:
                self._open[name] = self._open.get(name, "") + event["text"]

    def _close(self, name: str) -> None:
        text = self._open.pop(name, "")
        self.texts[name] += _trimmed(text, self._chat, stripped=self._stripped.get(name, True))


#: Fields of response templates that are text of a message, and what we call them.
_TEXTS = {"content": "content", "reasoning": "reasoning", "reasoning_content": "reasoning", "thinking": "reasoning"}


def _is_text(field: Any) -> bool:
    return field.content == "text" and field.transform is None and not field.repeats


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

    def read(self, ids: list[int], tools: Tools, *, calls: bool = True) -> Message:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        completion, _ = _split_stop(ids, self._chat)
        text = self._chat.plain_text(completion, special=True)
        reasoning, text = split_reasoning(text, _opens_reasoning(self._chat))
        try:
            body = {"messages": [], "tools": [dict(t) for t in tools or []] or None}
            request = ChatCompletionRequest.model_validate(body)
            parser: Any = self._parser
            extraction = parser(self._chat.tokenizer, request.tools).extract_tool_calls(text, request)
            if extraction.tools_called and calls:
                content, before = extraction.content or "", _before_calls(text, self._chat)
                # Some parsers drop what comes before a call.
                content = content if content.startswith(before) else before
                tool_calls = [c.model_dump() for c in extraction.tool_calls]
                return _message(
                    {"content": content, "reasoning": reasoning, "tool_calls": tool_calls}, completion, self._chat
                )
            text = text if extraction.tools_called else extraction.content or ""
        except Exception as error:  # noqa: BLE001 - a model writes anything, and the parser promises nothing
            _log.debug("not parsed (%s): %r", error, text)
        return _message({"content": text, "reasoning": reasoning}, completion, self._chat)


def _before_calls(text: str, chat: TemplateChat) -> str:
    """Text up to what may be the beginning of a call to any parser."""
    if (call := _MAY_CALL.search(text)) is not None:
        text = text[: call.start()].removesuffix("functools")
    return chat.without_special(text.rstrip())


#: What calls begin with in the formats of vLLM's parsers; before it one of them has a word.
_MAY_CALL = re.compile(r"[<\[{`]")


def choose_parser(chat: TemplateChat, choice: str) -> ResponseReader:
    """``choice``: "none", the name of a vLLM parser, or "auto": the tokenizer's own response template, else the one that
    TRL knows for this chat template, else one of TRL's that reads back what this template writes, else none."""
    if choice == "none":
        return PlainParser(chat)
    if choice != "auto":
        return VllmToolParser(chat, choice)
    if (response_template := getattr(chat.tokenizer, "response_template", None)) is not None:
        return TemplateParser(chat, "response_template", response_template)
    preferred, templates = _trl_templates(chat)
    for name, template in templates:
        try:
            candidate = TemplateParser(chat, name, template)
        except (ValueError, TypeError, KeyError):
            continue
        if template is preferred or _reads_back(chat, candidate):
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
    templates: list[tuple[str, Mapping[str, Any]]] = [
        (f"trl:{name.removesuffix('_template')}", value)
        for name, value in sorted(vars(trl).items())
        if name.endswith("_template") and isinstance(value, dict) and "fields" in value
    ]
    tokenizer, used = chat.tokenizer, chat.tokenizer.chat_template
    try:
        tokenizer.chat_template = chat.served_template  # TRL knows templates as they are published
        trl.add_response_schema(tokenizer)
        preferred = tokenizer.response_template
        tokenizer.response_template = None
    except (ValueError, AttributeError):
        return None, templates
    finally:
        tokenizer.chat_template = used
    return preferred, sorted(templates, key=lambda item: item[1] is not preferred)


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
    if shown := _shown_reasoning(reasoning, chat):
        message["reasoning"] = shown
    calls = [_call(c, i, ids) for i, c in enumerate(parsed.get("tool_calls") or [])]
    if calls:
        message["tool_calls"] = calls
    return message


def _shown_reasoning(reasoning: object, chat: TemplateChat) -> str:
    text = str(reasoning or "")
    return chat.without_special(text).strip("\n") if text.strip() else ""


def _call(call: Any, index: int, ids: Sequence[int]) -> ToolCall:
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments")
    if arguments is None:  # Llama 3 writes them as parameters
        arguments = function.get("parameters")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict) or not storable(arguments):
        raise ValueError(f"not a tool call: {call!r}")
    # Nine letters and digits, which is what the strictest template accepts; a function of the ids, so that it repeats.
    seed = xxhash.xxh3_64_hexdigest(repr((index, list(ids))).encode())
    return {"id": f"c{seed[:8]}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _split_stop(ids: list[int], chat: TemplateChat) -> tuple[list[int], int]:
    """(the completion, the token that closes it): a response template wants to see a turn closed, even one cut short."""
    if ids and ids[-1] in chat.stop_token_ids:
        return ids[:-1], ids[-1] if ids[-1] in chat.end_of_turn_ids else chat.end_of_turn_ids[0]
    return ids, chat.end_of_turn_ids[0]


def _opens_reasoning(chat: TemplateChat) -> bool:
    return chat.generation_prompt.rstrip().endswith("<think>")


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    """(reasoning between think tags, the rest); None for text without any. ``opened``: the prompt ended in the first tag."""
    start, _, rest = text.partition("<think>")
    if rest and not start.strip():
        text, opened = rest, True
    if not opened or "</think>" not in text:
        return None, start + rest if not opened else text
    reasoning, _, content = text.partition("</think>")
    return reasoning, content.lstrip("\n")
