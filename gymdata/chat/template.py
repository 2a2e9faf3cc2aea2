"""A tokenizer with its chat template: messages to ids, ids to messages, and the environment's ids between two turns.

Invariants: what a model wrote is read from its ids and never rendered again; a bridge is given only when the template
provably leaves earlier messages alone; nothing that a model writes can make ``parse`` raise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gymdata.chat._parsers import ResponseReader, choose_parser
from gymdata.chat.turn_tokens import Bridge, Template, end_of_turn_ids, most_characters
from gymdata.errors import DataError, UsageError
from gymdata.models._transformers import (
    generation_eos_ids,
    load_tokenizer,
    marked_chat,
    rendered_chat,
    writes_conversations_itself,
)
from gymdata.models.model_identity import tokenizer_facts, tokenizer_folder
from gymdata.rollouts.messages import Message, Tools, call_arguments
from gymdata.store.paths import Facts

_TWIN = "_training"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def known_template(text: str) -> str | None:
    """The name, as in TRL's folder, of the template with exactly this text that TRL ships."""
    return next((name for name, shipped in shipped_templates().items() if shipped == text), None)


def training_twin(text: str) -> tuple[str, str] | None:
    """Name and text of the training variant of a shipped template; None when it has none or TRL is not installed."""
    name = known_template(text)
    twin = None if name is None else shipped_templates().get(name + _TWIN)
    return None if twin is None else (f"{name}{_TWIN}", twin)


@functools.cache
def shipped_templates() -> dict[str, str]:
    trl = find_spec("trl")
    if trl is None or not trl.submodule_search_locations:
        return {}
    folder = Path(next(iter(trl.submodule_search_locations))) / "chat_templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


class NoTemplateError(UsageError):
    """A tokenizer has no chat template, and none was given."""


#: Texts of up to this many characters are tokenised quickly.
_LONG_TEXT = 200_000


class TransformersChat:
    """A ``Chat`` on a transformers tokenizer.

    ``end_of_turn_ids``: the tokens that the template writes after an assistant message, the one to insert first.
    ``stop_token_ids``: those and the checkpoint's own end tokens: what the sampler must stop at.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        served_template: str | None,
        eos_ids: Sequence[int],
        tool_parser: str,
        keep_reasoning: bool = True,
    ) -> None:
        if not tokenizer.chat_template:
            raise NoTemplateError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template",
                hint="give one with --chat-template FILE",
            )
        self.tokenizer = tokenizer
        self.served_template = served_template or tokenizer.chat_template
        self.vocab_size = len(tokenizer)
        self._special_ids = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
        self._special_texts = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._backend = None if cleans else backend
        self._eos_ids = tuple(eos_ids)
        self._replaced = False
        self._most_characters: int | None = None
        self._text_arguments = False
        self._parts = False
        self._parts = self._wants_parts()
        self._read_template(eos_ids)
        if keep_reasoning and not self._bridge.keeps_history():
            self._use_prefix_preserving_form(eos_ids)
        self.generation_prompt = self._find_generation_prompt()
        self._parser: ResponseReader = choose_parser(self, tool_parser)

    def _read_template(self, eos_ids: Sequence[int]) -> None:
        template = Template(
            text=lambda messages, tools, generate: self.text(messages, tools, generate=generate),
            encode=self.encode_with_ends,
            decode=self.decode,
            is_special=self._special_ids.__contains__,
        )
        self.end_of_turn_ids = end_of_turn_ids(template, eos_ids)
        if not self.end_of_turn_ids:
            raise UsageError(
                "no token ends an assistant message in this chat template, and the tokenizer has no end token",
                hint="give another template with --chat-template FILE",
            )
        self.stop_token_ids = tuple(dict.fromkeys([*self.end_of_turn_ids, *eos_ids]))
        self._bridge = Bridge(template, self.end_of_turn_ids, eos_ids)

    @classmethod
    def load(
        cls, path: str, *, chat_template: str | None = None, tool_parser: str = "auto", keep_reasoning: bool = True
    ) -> TransformersChat:
        """The tokenizer of a model folder or cached hub name (a LoRA folder's own, else its base's), never downloaded.

        ``chat_template``: a template's text or the path of a file with it, in place of the model's. ``tool_parser``:
        "auto", "none", or the name of one of vLLM's tool parsers. ``keep_reasoning``: replace a template that rewrites
        earlier turns by its known form that does not. Raises DataError when there is no tokenizer.
        """
        tokenizer = load_tokenizer(tokenizer_folder(path))
        served = tokenizer.chat_template
        if isinstance(served, dict):
            served = served.get("tool_use") or served.get("default")
            tokenizer.chat_template = served
        if chat_template is not None:
            if "{" not in chat_template:
                file = Path(chat_template)
                if not file.is_file():
                    raise DataError.missing_path(file, "a chat template's text, or a file with it")
                chat_template = file.read_text()
            tokenizer.chat_template = chat_template
        eos_ids = generation_eos_ids(Path(tokenizer.name_or_path))
        if tokenizer.eos_token_id is not None:
            eos_ids.append(tokenizer.eos_token_id)
        return cls(
            tokenizer,
            served_template=served,
            eos_ids=list(dict.fromkeys(eos_ids)),
            tool_parser=tool_parser,
            keep_reasoning=keep_reasoning,
        )

    @property
    def plain_ids(self) -> list[int]:
        """Ids that a model may sample: neither special nor added."""
        return [i for i in range(self.vocab_size) if i not in self._special_ids]

    @property
    def marks_generations(self) -> bool:
        """Whether the template marks the text that a model generates."""
        return _GENERATION.search(self.tokenizer.chat_template) is not None

    @property
    def most_ids(self) -> int:
        """One above the largest id that the model can sample: its embeddings may go beyond the tokenizer's ids."""
        file = Path(self.tokenizer.name_or_path, "config.json")
        config = json.loads(file.read_text()) if file.is_file() else {}
        named = (config.get("text_config") or config).get("vocab_size")
        return max(self.vocab_size, named if isinstance(named, int) else 0)

    def with_template(self, template: str, *, tool_parser: str = "none") -> TransformersChat:
        """The same tokenizer with another chat template, which is left as it is."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = template
        chat = TransformersChat(
            tokenizer,
            served_template=self.served_template,
            eos_ids=self._eos_ids,
            tool_parser=tool_parser,
            keep_reasoning=False,
        )
        chat._replaced = True
        return chat

    def facts(self) -> Facts:
        """Hashes and names for run.json."""
        return {
            **tokenizer_facts(self.tokenizer, self.tokenizer.chat_template, self.served_template),
            "chat_template_replaced": self._replaced,
            "end_of_turn_ids": list(self.end_of_turn_ids),
            "stop_token_ids": list(self.stop_token_ids),
            "tool_parser": self._parser.name,
            "vocab_size": self.vocab_size,
        }

    # --- messages to ids --------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the conversation with the generation prompt. Raises DataError when the template refuses the messages."""
        return self.encode(self.text(messages, tools, generate=True))

    def fewest_tokens(self, messages: Sequence[Message], tools: Tools) -> int:
        """A lower bound of ``len(render(…))`` for texts that take long to tokenise; 0 for others."""
        characters = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
        if characters < _LONG_TEXT:
            return 0
        if self._most_characters is None:
            self._most_characters = most_characters(self.tokenizer) or 0
        if not self._most_characters:
            return 0
        return len(self.text(messages, tools, generate=True)) // self._most_characters

    def bridge(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> list[int]:
        """Ids from just after the end of the last assistant message in ``messages`` through ``new`` and the generation
        prompt. Raises RefusedError when the template rewrites earlier messages."""
        if not any(m["role"] == "assistant" for m in messages):
            raise UsageError("a bridge starts at an assistant message, and the conversation has none")
        return self._bridge.ids(messages, new, tools)

    def keeps_history(self) -> bool:
        """Whether new messages leave earlier ones as they were. False for templates that strip earlier reasoning."""
        return self._bridge.keeps_history()

    # --- ids to messages --------------------------------------------------------------------------------------------

    def parse(self, token_ids: Sequence[int], tools: Tools, *, calls: bool = True) -> Message:
        """The assistant message in generated ids; without ``calls`` they are content. Never raises: what does not parse is
        content."""
        return self._parser.read([int(i) for i in token_ids], tools, calls=calls)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return self.plain_text(token_ids, special=True)

    def plain_text(self, token_ids: Sequence[int], *, special: bool) -> str:
        """Text of ids, with or without special tokens."""
        ids = [int(i) for i in token_ids]
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=not special))
        return str(self.tokenizer.decode(ids, skip_special_tokens=not special))

    def without_special(self, text: str) -> str:
        """Text with every special token's text taken out."""
        for token in self._special_texts:
            if token in text:
                text = text.replace(token, "")
        return text

    def written_by_template(self, message: Message, tools: Tools) -> list[int] | None:
        """Ids that the template would have a model write for this message, with the end of turn; None if it cannot."""
        user: Message = {"role": "user", "content": "begin"}
        try:
            start = self.text([user], tools, generate=True)
            conversation = self.text([user, message], tools, generate=False)
        except DataError:
            return None
        if not conversation.startswith(start):
            return None
        ids = self.encode(conversation[len(start) :])
        closing = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in self.end_of_turn_ids), len(ids))
        return ids[: closing + 1]

    # --- the template -----------------------------------------------------------------------------------------------

    def text(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        from jinja2.exceptions import TemplateError

        shaped = self._shaped(messages)
        try:
            return self._rendered(shaped, list(tools) if tools else None, generate)
        except TypeError as error:
            # Some templates join a call's arguments to text, so they want JSON where the others want a mapping.
            if not self._text_arguments and any(m.get("tool_calls") for m in messages):
                self._text_arguments = True
                with contextlib.suppress(DataError):
                    return self.text(messages, tools, generate=generate)
                self._text_arguments = False  # these messages are at fault, and others are not
            raise _refusal(messages, error) from error
        except (TemplateError, KeyError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise _refusal(messages, error) from error

    def generation_marks(self, messages: Sequence[Message], tools: Tools) -> list[tuple[int, int]] | None:
        """Where ``text`` is what the template marks as generated, as (start, end) of characters; None without any mark."""
        if not self.marks_generations or writes_conversations_itself(self.tokenizer):
            return None
        template, special = self.tokenizer.chat_template, self.tokenizer.special_tokens_map
        return marked_chat(template, self._shaped(messages), list(tools) if tools else None, special)

    def _shaped(self, messages: Sequence[Message]) -> list[Message]:
        return [_for_template(m, self._text_arguments, self._parts) for m in messages]

    def _rendered(self, messages: list[Message], tools: list[Any] | None, generate: bool) -> str:
        if writes_conversations_itself(self.tokenizer):
            # A tokenizer that writes conversations by code of its own.
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=generate, tokenize=False
                )
            )
        if not messages:
            raise ValueError("a conversation without messages")
        return rendered_chat(self.tokenizer.chat_template, messages, tools, generate, self.tokenizer.special_tokens_map)

    def encode(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Ids, and where each one ends in the text."""
        if self._backend is not None:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return list(encoding.ids), [end for _, end in encoding.offsets]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]

    def _wants_parts(self) -> bool:
        """Whether the template reads content only as a list of parts, as templates of models that see images do."""
        content = "what a user says"
        message: Message = {"role": "user", "content": content}
        try:
            if content in self.text([message], None, generate=True):
                return False
        except DataError:
            pass
        try:
            return content in self.text([{**message, "content": _as_parts(content)}], None, generate=True)
        except DataError:
            return False

    def _find_generation_prompt(self) -> str:
        messages: list[Message] = [{"role": "user", "content": "begin"}]
        conversation = self.text(messages, None, generate=False)
        prompt = self.text(messages, None, generate=True)
        return prompt[len(conversation) :] if prompt.startswith(conversation) else ""

    def _use_prefix_preserving_form(self, eos_ids: Sequence[int]) -> None:
        """Replace a template that rewrites history by its known form that does not, if TRL ships one."""
        original = self.tokenizer.chat_template
        twin = training_twin(original)
        if twin is None:
            return
        self.tokenizer.chat_template, self._replaced = twin[1], True
        self._read_template(eos_ids)
        if not self._bridge.keeps_history():
            self.tokenizer.chat_template, self._replaced = original, False
            self._read_template(eos_ids)


def _refusal(messages: Sequence[Message], error: Exception) -> DataError:
    roles = ", ".join(str(m["role"]) for m in messages)
    refusal = DataError(f"the chat template refuses a conversation of ({roles}): {error}")
    refusal.reason = f"the chat template refuses the conversation: {error}"
    return refusal


def _for_template(message: Message, text_arguments: bool, parts: bool) -> Message:
    """A message in the shape that templates expect: no nulls, reasoning under the names that they read, and the arguments of
    calls as objects, or as the text of one (``text_arguments``). Raises DataError for arguments that are no object."""
    out = {key: value for key, value in message.items() if value is not None}
    out.setdefault("content", "")
    if "reasoning" in out:
        out.setdefault("reasoning_content", out["reasoning"])
        out.setdefault("thinking", out["reasoning"])
    if parts and isinstance(out["content"], str):
        out["content"] = _as_parts(out["content"])
    if not out.get("tool_calls"):
        out.pop("tool_calls", None)
    else:
        arguments = [call_arguments(c["function"]) for c in out["tool_calls"]]
        shaped = [json.dumps(a, ensure_ascii=False) for a in arguments] if text_arguments else arguments
        out["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": a}} for c, a in zip(out["tool_calls"], shaped, strict=True)
        ]
    return out


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
