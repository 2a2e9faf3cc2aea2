"""Chat templates that are known by their text, and a template as something that can be probed.

What always holds: a template is recognised by its exact text only; TRL's files are read where they are installed, and TRL
itself, which loads torch, is not imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.ports import Message

if TYPE_CHECKING:
    from gymdata.adapters.engines.chat import TransformersChat

_TWIN = "_training"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A template that TRL ships. ``name`` as in its folder."""

    name: str
    text: str


def known_template(text: str) -> KnownTemplate | None:
    """The shipped template with exactly this text."""
    return next((KnownTemplate(name, known) for name, known in _shipped().items() if known == text), None)


def training_twin(text: str) -> KnownTemplate | None:
    """The form of a shipped template that is made for training; None when there is none or TRL is not installed."""
    known = known_template(text)
    if known is None or known.name.endswith(_TWIN):
        return None
    twin = _shipped().get(known.name + _TWIN)
    return KnownTemplate(known.name + _TWIN, twin) if twin is not None else None


@functools.cache
def _shipped() -> dict[str, str]:
    found = find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(next(iter(found.submodule_search_locations))) / "chat_templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


class ChatRendering:
    """A ``TransformersChat`` as the template check wants it."""

    def __init__(self, chat: TransformersChat) -> None:
        self._chat = chat
        self.end_of_turn_ids = chat.end_of_turn_ids
        self.stop_token_ids = chat.stop_token_ids
        tokenizer = chat.tokenizer
        special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
        self.plain_ids = [i for i in range(chat.vocab_size) if i not in special]

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, generate: bool) -> str:
        """Raises DataError when the template refuses the conversation."""
        return self._chat.text(messages, tools, generate=generate)

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._chat.decode(token_ids)

    def bridge(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        return self._chat.bridge(messages, new, tools)

    def marks_generations(self) -> bool:
        return _GENERATION.search(self._chat.tokenizer.chat_template) is not None
