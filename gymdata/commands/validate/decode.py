"""T207: do the generated ids decode to the text of their message?

Invariants: only words are compared, white space is not; a message that names no turn is not judged. Special tokens count
or not, as the message has them: parsers drop them from what they return.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence

from gymdata.checks.breaks import Reading
from gymdata.checks.violations import Violation
from gymdata.rollouts.messages import Message
from gymdata.rollouts.schema import ROLLOUTS, TURN
from gymdata.rollouts.turns import Turn
from gymdata.store.columns import Fault
from gymdata.store.paths import Source
from gymdata.store.tables import batches

#: Rollouts with the generations alone of their turns.
_READ = ROLLOUTS.without(*(f"turns.{f.name}" for f in TURN if f.name != "generation_token_ids"))


def decoded_faults(sources: Iterable[Source], reading: Reading) -> Iterator[Violation]:
    """Every assistant message whose content, reasoning or tool names are not in its decoded generation."""
    for source in sources:
        for part in batches(source, ROLLOUTS, ["rollout_id", "messages", "turns"], read=_READ, batch_size=256):
            if isinstance(part, Fault) or not {"messages", "turns"} <= set(part.data.schema.names):
                continue  # which the checks of structure have named
            for number, row in zip(part.rows.tolist(), part.data.to_pylist(), strict=True):
                for v in _rollout(row["messages"], row["turns"], reading):
                    yield v._replace(row=number, rollout_id=row.get("rollout_id"), file=str(source.path))


def _rollout(messages: Sequence[Message], turns: Sequence[Turn], reading: Reading) -> Iterator[Violation]:
    for message in messages:
        turn = message["turn"]
        if message["role"] != "assistant" or turn is None or not 0 <= turn < len(turns):
            continue
        ids = list(turns[turn]["generation_token_ids"])
        text = reading.decode(ids)
        words = _squeezed(text)
        texts = [(field, message[field]) for field in ("content", "reasoning") if message[field]]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for call in json.loads(message["tool_calls"] or "[]"):
                texts.append(("tool call", str(call["function"]["name"])))  # noqa: PERF401 - those before an invalid one
        for field, message_text in texts:
            if _squeezed(message_text) not in words and not _without_special(message_text, ids, words, reading):
                yield Violation("T207", 0, turn=turn, expected=message_text[:80], got=text[:80], detail=field)


def _squeezed(text: str) -> str:
    """Without white space, which servers strip and JSON writers add."""
    return "".join(text.split())


def _without_special(message_text: str, ids: list[int], words: str, reading: Reading) -> bool:
    """Whether each line is there, with or without the special tokens in it: a parser may cut some out, and join parts."""
    plain, bare = _squeezed(reading.decode([i for i in ids if i not in reading.special])), words
    for special in {_squeezed(reading.decode([i])) for i in ids if i in reading.special} - {""}:
        message_text, bare = message_text.replace(special, ""), bare.replace(special, "")
    return all(line in plain or line in bare for line in map(_squeezed, message_text.splitlines()))
