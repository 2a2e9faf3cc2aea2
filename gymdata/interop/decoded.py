"""Conversations that trainers saved as the text of their tokens: a prompt as a chat template wrote it, and what was sampled.

Nothing is guessed: text of a template is split into messages where it has one reading only, and any other is refused.
"""

from __future__ import annotations

import re

from gymdata.interop.importing import BadItem
from gymdata.interop.rows import message_of
from gymdata.interop.text_rows import conversation
from gymdata.rollouts.messages import Message

#: How templates write a message (role, text), of ChatML, Llama 3 and Gemma.
_WRITTEN = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)",
        r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
        r"<start_of_turn>(\w+)\n(.*?)(?:<end_of_turn>\n?|\Z)",
    )
)
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "model": "assistant", "tool": "tool"}
#: Tokens around a text that are no part of a message.
_AROUND = ("<|begin_of_text|>", "<bos>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
_MARKER = re.compile(r"<\|\w+\|>|<start_of_turn>|\[/?INST\]|<｜")
#: Lines that are roles where special tokens were left out.
_LINE = re.compile(r"^(system|user|assistant|model)$", re.MULTILINE)


def split(prompt: str, output: str, where: str) -> tuple[list[Message], list[Message]]:
    """The messages of ``prompt`` and those that begin in ``output``; text that the prompt begins the answer with is a part
    of it. ``where``: the column of the prompt. Raises BadItem."""
    text = prompt
    for token in _AROUND:
        text = text.removeprefix(token)
    written = next((pattern for pattern in _WRITTEN if pattern.match(text)), None)
    if written is not None:
        return _split_written(text, output, written, where)
    if _MARKER.search(text):
        raise BadItem("S102", f"{where}: got text of a chat template that is not known")
    roles = list(_LINE.finditer(text))
    if not roles or roles[0].start() or roles[0][0] not in ("system", "user"):
        return conversation(prompt, where), [message_of("assistant", output)]
    names = [_ROLES[role[0]] for role in roles]
    if names not in (["user", "assistant"], ["system", "user", "assistant"]) or _LINE.search(output):
        raise BadItem(
            "S102", f"{where}: got text without the special tokens of its template, of which messages are not sure"
        )
    ends = [role.start() - 1 for role in roles[1:]]
    texts = [text[role.end() + 1 : end] for role, end in zip(roles, ends, strict=False)]
    opening = [message_of(name, content) for name, content in zip(names, texts, strict=False)]
    return opening, [message_of("assistant", text[roles[-1].end() + 1 :] + output)]


def _split_written(
    prompt: str, output: str, pattern: re.Pattern[str], where: str
) -> tuple[list[Message], list[Message]]:
    text, end, messages = prompt + output, 0, []
    for token in _AROUND:
        text = text.removesuffix(token)
    while end < len(text):
        match = pattern.match(text, end)
        role = _ROLES.get(match[1]) if match else None
        if match is None or role is None or _MARKER.search(match[2]):
            raise BadItem(
                "S102", f"{where}: got text of a chat template, with {text[end : end + 40]!r} between messages"
            )
        end = match.end()
        messages.append((end > len(prompt), message_of(role, match[2])))
    opening = [message for after, message in messages if not after]
    return opening, [message for after, message in messages if after]
