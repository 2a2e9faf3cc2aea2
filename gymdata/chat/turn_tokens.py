"""How a chat template closes an assistant's turn, and what it writes between that and the model's next word.

Invariants: nothing that the model wrote is rendered; in its place stands a fixed text, rendered once alone and once
with the new messages after it. A bridge is given only when both renderings are the same up to the token that closes the
stand-in, when the new messages are really in it, and when the ids of the whole say the same as the ids of the part.

How many characters one id can stand for (``most_characters``) is certain, or None: it takes a tokenizer whose every
character ends in some token, without fused unknowns, added tokens that swallow the white space beside them, or a
normaliser that may take characters away.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.messages import Message, ToolCall, Tools
from gymdata.rollouts.next_prompt import bridge_ids

#: Code points that canonical composition can make one of.
_COMPOSED = 4


def most_characters(tokenizer: Any) -> int | None:
    """Characters of text that one id of this transformers tokenizer covers at most; None when that is not certain."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    tokenizer_json = json.loads(backend.to_str())
    model, normaliser = tokenizer_json["model"], tokenizer_json.get("normalizer")
    if model.get("type") != "BPE" or model.get("fuse_unk"):
        return None
    if normaliser is not None and normaliser.get("type") != "NFC":
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in tokenizer_json.get("added_tokens", ())):
        return None
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return longest * (_COMPOSED if normaliser is not None else 1)


#: A placeholder for the assistant's text: words that no template looks for and no JSON escape changes.
STAND_IN = "gymdata stands here"
_PROBE = "gymdata asks this"
_CALL_ID = "call00000"
_USER: Message = {"role": "user", "content": "begin"}
_HINT = "use a prefix-preserving template (--chat-template FILE); `gymdata check MODEL` names one where known"


class RewrittenError(RefusedError):
    """The template changes earlier messages when new ones follow."""


@dataclass(frozen=True, slots=True)
class Template:
    """What this module needs of a tokenizer: text of messages (DataError when refused), ids with their ends in the text,
    text of ids, and whether an id is a special or added token."""

    text: Callable[[Sequence[Message], Tools, bool], str]
    encode: Callable[[str], tuple[list[int], list[int]]]
    decode: Callable[[Sequence[int]], str]
    is_special: Callable[[int], bool]


def end_of_turn_ids(template: Template, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that close an assistant's turn, the one to insert first; ``eos_ids`` when the template writes none."""
    end_ids: list[int] = []
    for stand_in, follower in ((_assistant(), _USER), (_calling(None), _answer())):
        tails = []
        for messages in ([_USER, stand_in], [_USER, stand_in, follower]):
            try:
                tails.append(_tail(template.text(messages, None, False)))
            except (DataError, RefusedError):
                continue
        if not tails:
            continue
        shortest = min(tails, key=len)
        size = next((i for i, c in enumerate(shortest) if any(t[i] != c for t in tails)), len(shortest))
        # never cut a token's text in two: "<|end|>" and "<|endoftext|>" share "<|end"
        shared = shortest[:size] if len(set(tails)) == 1 else shortest[: max(shortest.rfind(">", 0, size) + 1, 0)]
        ids = [i for i in template.encode(shared)[0] if template.is_special(i)]
        # A template may write other marks before the one that ends the turn; the checkpoint says which one that is.
        ending = [i for i in ids if i in eos_ids] or (ids[-1:] if follower is _USER else [])
        if not ending:  # it closes a last turn with another token than an earlier one: the earlier one's goes first
            firsts = [next((i for i in template.encode(t)[0] if template.is_special(i)), None) for t in reversed(tails)]
            opening = _opening_ids(template) - set(eos_ids)
            ending = [i for i in firsts if i is not None and i not in opening and (follower is _USER or i in eos_ids)]
        end_ids += ending
    return tuple(dict.fromkeys(end_ids or eos_ids))


def _opening_ids(template: Template) -> set[int]:
    """The special tokens that the template writes before a user message, and not behind one."""
    before, _, behind = template.text([_USER], None, False).rpartition(_USER["content"])
    opening, closing = ({i for i in template.encode(t)[0] if template.is_special(i)} for t in (before, behind))
    return opening - closing


class Bridge:
    """Cuts bridges of one template. ``end_of_turn``: see ``end_of_turn_ids``."""

    def __init__(self, template: Template, end_of_turn: Sequence[int], stop_ids: Sequence[int]) -> None:
        self._template = template
        self._closing = frozenset([*end_of_turn, *stop_ids])
        self._shapes: dict[tuple[Any, ...], int] = {}

    def ids(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> list[int]:
        """From just after the token that closes the last assistant message in ``messages``, through ``new``, to the
        generation prompt. Raises RefusedError when that cannot be proved, DataError when the template refuses."""
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        earlier = [_as_context(m) for m in messages[:last]]
        between = [*messages[last + 1 :], *new]
        # Some templates refuse, or drop, a tool's answer to no call; others leave out the content of a message with calls.
        calls = messages[last].get("tool_calls")
        stand_ins = [_calling(calls), _assistant()] if calls else [_assistant(), _calling(calls)]
        shape = (tuple(m["role"] for m in between), len(calls or ()), bool(tools))
        if shape in self._shapes:
            return self._cut([*earlier, stand_ins[self._shapes[shape]]], between, tools, prove=False)
        refusals: list[DataError | RefusedError] = []
        for which, stand_in in enumerate(stand_ins):
            try:
                probes = [m | {"content": _PROBE} if isinstance(m.get("content"), str) else m for m in between]
                self._cut([*earlier, stand_in], probes, tools, prove=True)
                ids = self._cut([*earlier, stand_in], between, tools, prove=True)
            except (DataError, RefusedError) as error:
                refusals.append(error)
                continue
            self._shapes[shape] = which
            return ids
        # A stand-in that the template itself refuses says less than one that it rendered.
        raise min(
            refusals, key=lambda r: 0 if isinstance(r, RewrittenError) else 1 if isinstance(r, RefusedError) else 2
        )

    def keeps_history(self) -> bool:
        """Whether new messages leave earlier ones as they were. False for templates that strip earlier reasoning."""
        for completion, follower in ((_assistant(), _USER), (_calling(None), _answer())):
            try:
                self.ids([_USER, completion], [follower], None)
            except RewrittenError:
                return False
            except (DataError, RefusedError):
                continue  # a template without tools says so itself when it meets one
        return True

    def _cut(self, start: Sequence[Message], between: Sequence[Message], tools: Tools, *, prove: bool) -> list[int]:
        before = self._template.text(start, tools, False)
        after = self._template.text([*start, *between], tools, True)
        head = len(before) - len(_tail(before))
        if not after.startswith(before[:head]):
            self._rewritten(before[:head], after)
        rest_ids, rest_ends = self._template.encode(after[head:])
        closing = self._first_closing(rest_ids)
        alone_ids, alone_ends = self._template.encode(before[head:])
        alone = self._first_closing(alone_ids)
        written = after[head : head + (rest_ends[closing - 1] if closing else 0)] if closing is not None else None
        alone_end = len(before) - head if alone is None else (alone_ends[alone - 1] if alone else 0)
        if closing is None or written is None or written.rstrip() != before[head : head + alone_end].rstrip():
            raise RefusedError(
                f"what closes an assistant's turn cannot be distinguished from what follows it: {after[head : head + 80]!r}",
                hint=_HINT,
            )
        ids = rest_ids[closing + 1 :]
        if prove:
            self._prove(before[:head] + after[head : head + rest_ends[closing]], after, ids, between)
        return ids

    def _prove(self, closed: str, after: str, ids: list[int], between: Sequence[Message]) -> None:
        """The ids of the whole conversation, cut by ids, must be the same; and nothing new may be left out."""
        after_ids, _ = self._template.encode(after)
        if bridge_ids(self._template.encode(closed)[0], after_ids, self._closing) != ids:
            raise RefusedError("the template's text is not cut at its end-of-turn token by this tokenizer", hint=_HINT)
        written = after[len(closed) :]
        for message in between:
            if message.get("content") == _PROBE and written.count(_PROBE) < len(between):
                raise RefusedError(f"the template leaves out a message of role {message['role']!r}", hint=_HINT)

    def _first_closing(self, ids: Sequence[int]) -> int | None:
        return next((k for k, i in enumerate(ids) if i in self._closing), None)

    def _rewritten(self, head: str, after: str) -> None:
        """Raise RewrittenError that names the first token that changed."""
        was, _ = self._template.encode(head)
        now, _ = self._template.encode(after)
        index = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        window = [self._template.decode(ids[max(0, index - 4) : index + 12]) for ids in (was, now)]
        raise RewrittenError(
            f"the template rewrites earlier messages when new ones follow: from token {index}, {window[0]!r} becomes "
            f"{window[1]!r}",
            hint=_HINT,
        )


def _as_context(message: Message) -> Message:
    """An earlier message as it is rendered around a bridge. Fixed words replace its text, because many templates remove
    reasoning or white space from earlier turns, and the generated ids are held anyway."""
    if message["role"] != "assistant":
        return message
    calls = message.get("tool_calls")
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else {**_assistant(), "content": "said"}


def _assistant() -> Message:
    return {"role": "assistant", "content": STAND_IN}


def _calling(calls: Sequence[ToolCall] | None) -> Message:
    plain = {"type": "function", "id": _CALL_ID, "function": {"name": "f", "arguments": {}}}
    stand_in = copy.deepcopy(list(calls or [plain]))
    stand_in[-1] = {**stand_in[-1], "function": {**stand_in[-1]["function"], "arguments": {"x": STAND_IN}}}
    return {"role": "assistant", "content": "", "tool_calls": stand_in}


def _answer() -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": _CALL_ID, "content": "done"}


def _tail(text: str) -> str:
    """The text after the last placeholder."""
    _, stand_in, tail = text.rpartition(STAND_IN)
    if not stand_in:
        raise RefusedError("the chat template leaves out what an assistant message says", hint=_HINT)
    return tail
