"""A rollout as people read it, on a terminal, on the pages of ``view`` and in a report: messages, tool calls and faults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gymdata.checks.batches import check_batch
from gymdata.checks.violations import CODES, Violation
from gymdata.errors import printable
from gymdata.rollouts.turn_columns import from_arrow

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.checks.breaks import Reader


@dataclass(frozen=True, slots=True)
class CallView:
    """A tool call; one that is no object with a name has no ``name``, and is its own ``arguments``."""

    name: str
    arguments: object

    @property
    def text(self) -> str:
        """The arguments as JSON, or as the text that they are."""
        args = self.arguments
        return printable(args if isinstance(args, str) else json.dumps(args, ensure_ascii=False, default=str))


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message. ``turn``: the turn that sampled it, and ``reward``: of that turn; None where there is none."""

    role: str
    content: str
    reasoning: str
    name: str
    turn: int | None
    reward: float | None
    calls: list[CallView]


def parsed(text: object) -> object:
    """The value of a JSON text; whatever else it is, as it is."""
    try:
        return json.loads(text) if isinstance(text, (str, bytes)) else text
    except (ValueError, RecursionError):
        return text


def messages_of(messages: Sequence[Mapping[str, object]], turns: Sequence[Mapping[str, object]]) -> list[MessageView]:
    """Messages for people, with the rewards of the turns that sampled them."""
    views = []
    for message in messages:
        content, reasoning, name = (printable(str(message.get(key) or "")) for key in ("content", "reasoning", "name"))
        turn = message.get("turn")
        number = turn if isinstance(turn, int) else None
        reward = turns[number].get("reward") if number is not None and 0 <= number < len(turns) else None
        score = float(reward) if isinstance(reward, (int, float)) else None
        calls = parsed(message.get("tool_calls")) or []
        called = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function") or call if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and "name" in function:
                called.append(CallView(printable(str(function["name"])), function.get("arguments")))
            else:
                called.append(CallView("", call))
        views.append(MessageView(printable(str(message.get("role"))), content, reasoning, name, number, score, called))
    return views


def violations(batch: pa.RecordBatch, first: int, vocab: int | None, reader: Reader | None) -> list[Violation]:
    """The violations in the rows of a batch, each with its severity; ``first`` is the number of its first row."""
    evidence = from_arrow(batch, first)
    with_ids = set(evidence.rows[evidence.turns.has_ids()].tolist())
    faults = []
    for violation in check_batch(evidence, vocab_size=vocab, reader=reader):
        # A rollout of texts has no token ids, and is not damaged.
        of_texts = violation.code == "T205" and violation.row not in with_ids
        severity = "warning" if of_texts else violation.severity or CODES[violation.code].severity
        faults.append(violation._replace(severity=severity))
    return faults
