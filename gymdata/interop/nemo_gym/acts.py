"""What the model of a NeMo Gym row did, besides tokens: texts, calls and tool results, as counts for the checks of
behavior.

Invariants: only the output counts, not what the row was given; nothing of a text is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymdata.rollouts.messages import SPELLED_CALL, TOOL_ERROR
from gymdata.rollouts.ragged import Ragged

_is_error, _spells_call = re.compile(TOOL_ERROR).search, re.compile(SPELLED_CALL).search

#: (list, period, start, end) of each list that repeats itself over and over.
Loops = Callable[[Ragged], list[tuple[int, int, int, int]]]


class RowActs(NamedTuple):
    """One row. ``turns`` count as in validation."""

    row: int
    rollout_id: str | None
    #: Tool results, and those that are errors.
    results: int
    failed: int
    #: Messages with an unparsed tool call in their text, and the turn of the first.
    spelled: int
    spelled_turn: int | None
    parsed: bool
    offered: bool
    #: Whether the last call was cut at a token limit; None when the row does not say.
    cut: bool | None
    last_turn: int
    #: (turn, sampled tokens) of calls without text or tool calls.
    silent: tuple[tuple[int, int], ...]


class Odd(NamedTuple):
    """The criteria of the checks of behavior: repetition in token lists, and the number of errors among tool
    results."""

    loops: Loops
    storm: Callable[[int, int], str | None]


@dataclass(slots=True)
class PathActs:
    """Many rows: counts, and the rows themselves where one of them alone is odd."""

    odd: list[RowActs] = field(default_factory=list)
    #: Rows that say whether their last call was cut, and those where it was.
    known: int = 0
    cut: int = 0
    first_cut: RowActs | None = None
    #: Messages with an unparsed tool call in their text.
    spelled: int = 0
    first_spelled: RowActs | None = None
    parsed: bool = False
    offered: bool = False

    def add(self, one: RowActs, row: int, rollout_id: str | None, odd: Odd) -> None:
        """The next row."""
        storm = odd.storm(one.failed, one.results) is not None
        if storm or one.silent or one.cut or one.spelled:
            one = one._replace(row=row, rollout_id=rollout_id)
        if storm or one.silent:
            self.odd.append(one)
        self.known += one.cut is not None
        if one.cut:
            self.cut += 1
            self.first_cut = self.first_cut or one
        if one.spelled:
            self.spelled += one.spelled
            self.first_spelled = self.first_spelled or one
        self.parsed, self.offered = self.parsed or one.parsed, self.offered or one.offered

    def append(self, other: PathActs, base: int) -> None:
        """Join the rows that follow, which count from ``base``."""

        def moved(one: RowActs | None) -> RowActs | None:
            return None if one is None else one._replace(row=one.row + base)

        self.odd += [one._replace(row=one.row + base) for one in other.odd]
        self.known, self.cut, self.spelled = (
            self.known + other.known, self.cut + other.cut, self.spelled + other.spelled
        )  # fmt: skip
        self.first_cut = self.first_cut or moved(other.first_cut)
        self.first_spelled = self.first_spelled or moved(other.first_spelled)
        self.parsed, self.offered = self.parsed or other.parsed, self.offered or other.offered


class Acts:
    """Collects one row's ``RowActs``, item by item."""

    __slots__ = ("_thoughts", "failed", "parsed", "results", "speaks", "spelled", "spelled_turn")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.results = self.failed = self.spelled = 0
        self.spelled_turn: int | None = None
        self.parsed = False
        #: By call, whether it has text or a tool call.
        self.speaks: list[bool] = []
        self._thoughts: list[tuple[int, Any]] = []

    def model(self, item: Any, kind: Any, begins: int, lists: Any) -> None:
        """An item that the model wrote."""
        if begins:
            self.speaks.append(False)
        if kind == "function_call" or _filled(item.get("tool_calls"), lists):
            self.parsed = self.speaks[-1] = True
        elif kind == "reasoning":
            # Read only when the call has nothing else; most calls end with a message or a tool call.
            self._thoughts.append((len(self.speaks) - 1, item))
        else:
            texts = list(_texts(item.get("content"), lists))
            # A refusal is an answer, and so is a part of another kind.
            self.speaks[-1] |= any(map(str.strip, texts)) or (not texts and _filled(item.get("content"), lists))
            # One parsed call of the path is enough for B805 to be silent.
            if not self.parsed and any(map(_spells_call, texts)):
                self.spelled += 1
                if self.spelled_turn is None:
                    self.spelled_turn = len(self.speaks) - 1

    def result(self, output: Any, lists: Any) -> None:
        """A tool's result."""
        self.results += 1
        self.failed += any(map(_is_error, (output,) if isinstance(output, str) else _texts(output, lists)))

    def of_row(self, value: Any, response: Any, lists: Any, generated: list[int]) -> RowActs:
        """The whole row. ``generated``: sampled tokens by call. Its number and id are the caller's to fill in."""
        params, details = value.get("responses_create_params"), response.get("incomplete_details")
        reason = details.get("reason") if lists.is_object(details) else None
        cut = True if reason == "max_output_tokens" else False if response.get("status") == "completed" else None
        offered = lists.is_object(params) and _filled(params.get("tools"), lists)
        silent = tuple((t, n) for t, (n, says) in enumerate(zip(generated, self.speaks, strict=True)) if n and not says)
        if silent:
            thought = {turn for turn, item in self._thoughts if _thinks(item, lists)}
            silent = tuple(one for one in silent if one[0] not in thought)
        return RowActs(0, None, self.results, self.failed, self.spelled, self.spelled_turn, self.parsed, offered, cut,
                       len(generated) - 1, silent)  # fmt: skip


def _thinks(item: Any, lists: Any) -> bool:
    """Whether a reasoning item has text, or is encrypted."""
    texts = (text for key in ("summary", "content") for text in _texts(item.get(key), lists))
    return bool(item.get("encrypted_content")) or any(map(str.strip, texts))


def _filled(value: Any, lists: Any) -> bool:
    return lists.is_list(value) and len(value) > 0


def _texts(content: Any, lists: Any) -> Iterator[str]:
    """A text, or those of a list of parts."""
    if isinstance(content, str):
        yield content
    elif lists.is_list(content):
        for part in content:
            text = part.get("text") if lists.is_object(part) else part
            if isinstance(text, str):
                yield text
