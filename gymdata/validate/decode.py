"""T207: do the generated ids decode to the text of their message? Needs a tokenizer, so it runs only on request.

Invariants: only words are compared, white space is not; a message that names no turn is not judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gymdata.errors import DataError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.violations import Violation
from gymdata.store import scan_batches
from gymdata.store.paths import Source


def decoded_faults(sources: Iterable[Source], decode: Callable[[Sequence[int]], str]) -> Iterator[Violation]:
    """Every assistant message whose content, reasoning or tool names are not in its decoded generation."""
    for source in sources:
        row = 0
        try:
            for batch in scan_batches(source.path, ROLLOUTS, ["rollout_id", "messages", "turns"], batch_size=256):
                for rollout in batch.to_pylist():
                    for v in _rollout(rollout, decode):
                        yield v._replace(row=row, rollout_id=rollout["rollout_id"], file=str(source.path))
                    row += 1
        except DataError:
            # The checks of structure have named what cannot be read.
            continue


def _rollout(rollout: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> Iterator[Violation]:
    for message in rollout["messages"]:
        turn = message["turn"]
        if message["role"] != "assistant" or turn is None or not 0 <= turn < len(rollout["turns"]):
            continue
        text = decode(rollout["turns"][turn]["generation_token_ids"])
        for what, message_text in _texts(message):
            if _words(message_text) not in _words(text):
                yield Violation("T207", 0, turn=turn, expected=message_text[:80], got=text[:80], detail=what)


def _texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for what in ("content", "reasoning"):
        if message[what]:
            yield what, message[what]
    try:
        calls = json.loads(message["tool_calls"] or "[]")
        for call in calls:
            yield "tool call", str(call["function"]["name"])
    except (ValueError, KeyError, TypeError):
        return


def _words(text: str) -> str:
    return "".join(text.split())
