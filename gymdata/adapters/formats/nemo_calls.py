"""Which model call each item of a NeMo Gym row belongs to: the one reading that validate, import and --fix share.

A call is a run of items that the model wrote (reasoning, message, function calls), ended by the item that has the ids or by
what others wrote. Some converters put the ids on the message and write its function calls after it: those without ids belong
to that message, unless ids on one of them make them a call of their own. Invariants: every item belongs to exactly one call;
a call has at most one item with ids; empty and null lists are no ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

PROMPT, GENERATION, LOG_PROBS = TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
#: Other names of roles: a message that keeps one would be read as nobody's, so a row with one is refused.
_OTHER_NAMES = dict.fromkeys(("human",), "user") | dict.fromkeys(("gpt", "ai", "bot", "chatbot", "model"), "assistant")
#: Items, each with the number of its call.
Walked = Iterable[tuple[int, dict[str, Any]]]


def written_by_model(item: Mapping[str, Any]) -> bool:
    """Whether a model call produced the item."""
    return item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant"


def holds_ids(item: Mapping[str, Any]) -> bool:
    """Whether an item that the model wrote has prompt or generation ids."""
    return bool(item.get(PROMPT)) or bool(item.get(GENERATION))


def meant_role(role: Any) -> str | None:
    """The role that a message should name in place of ``role``; None when that is no other name of one."""
    return _OTHER_NAMES.get(role.lower()) if isinstance(role, str) else None


class CallBorders:
    """Told of every item in order, it says where calls begin. ``count``: calls begun so far; ``open``: the last of
    them goes on."""

    __slots__ = ("count", "open", "trailing")

    def __init__(self) -> None:
        self.count = 0
        self.open = False
        #: Function calls since a message with ids; below 0 when what came last is neither.
        self.trailing = -1

    def model(self, kind: Any, has_ids: bool) -> int:
        """An item that the model wrote. Returns how many of its items, up to and with this one, begin a new call; 0 when
        it goes on with the current one. ``kind`` is the item's type."""
        begins = 0 if self.open else 1
        if kind == "function_call" and self.trailing >= 0:
            if not has_ids:
                self.trailing += 1
                return 0
            begins = self.trailing + 1
        self.trailing = 0 if has_ids and kind not in ("function_call", "reasoning") else -1
        self.open = not has_ids
        self.count += begins > 0
        return begins

    def other(self) -> None:
        """An item that the model did not write ends its call."""
        self.open, self.trailing = False, -1


def walk(
    items: Iterable[Any], holds: Callable[[Mapping[str, Any]], bool] = holds_ids
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each item with the number of the call that wrote it, or that it follows (-1: none). Nested lists are flattened.
    ``holds``: whether an item has ids; for items whose lists were moved elsewhere."""
    borders = CallBorders()
    #: Function calls after a message with ids: theirs is known when the next item is.
    waiting: list[dict[str, Any]] = []
    for item in _flat(items):
        if not written_by_model(item):
            borders.other()
            yield from ((borders.count - 1, one) for one in waiting)
            waiting = []
            yield borders.count - 1, item
            continue
        begins = borders.model(item.get("type"), holds(item))
        if borders.trailing > 0:
            waiting.append(item)
            continue
        theirs = borders.count - 1 - (begins == 1)
        yield from ((theirs, one) for one in waiting)
        waiting = []
        yield borders.count - 1, item
    yield from ((borders.count - 1, one) for one in waiting)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """The items in nested lists, in order, however deep they lie."""
    open_lists = [iter(items)]
    while open_lists:
        for item in open_lists[-1]:
            if isinstance(item, list):
                open_lists.append(iter(item))
                break
            yield item
        else:
            open_lists.pop()
