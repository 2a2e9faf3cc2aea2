"""Rows of the rollouts table for formats that are imported: messages, and the columns of what another project wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import takewhile
from typing import Any

from gymdata.formats.conversion.importing import BadItem, Importing, rollout_id_of
from gymdata.formats.text.words import as_float, score
from gymdata.rollouts.failures import Failure, masked_extra
from gymdata.rollouts.messages import ROLES, STRICT, Message, TableRow
from gymdata.rollouts.turns import TurnEncoder
from gymdata.store.lines import encode

#: What exports count of turns, and of rollouts besides; of pairs; and of experiences.
OF_TURNS = ("turns", "branches", "step rewards", "facts of turns")
KINDS = {
    "rollouts": (*OF_TURNS, "rewards", "named rewards"),
    "pairs": ("weights", "margins"),
    "experiences": ("weights",),
}
#: ``started_at`` of a rollout whose format says not when it began; summaries count these, `show` leaves the time out.
NO_TIME = datetime.fromtimestamp(0, UTC)
#: The extra of a message that its file does not train.
NOT_TRAINED = STRICT.encode({"weight": 0})
#: The fields of a message that a chat template reads.
_READ = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")


@cache
def message_fields() -> list[str]:
    """The fields of a message of the table."""
    from gymdata.rollouts.schema import MESSAGE  # loads pyarrow

    return [f.name for f in MESSAGE]


def message_of(role: Any, content: Any, **more: Any) -> Message:
    """A message with every field of the table. An unknown role is ``other``."""
    message = dict.fromkeys(message_fields())
    return message | {"role": role if role in ROLES else "other", "content": content} | more


def foreign_row(
    item: Any,
    messages: Sequence[Message],
    importing: Importing,
    *,
    turns: TurnEncoder | None = None,
    group: str | None = None,
    opening: Sequence[Message] = (),
    policy: str = "unknown",
    reward: Any = None,
    tools: str = "[]",
    started_at: str | None = None,
    duration_s: float = 0.0,
    known_as: Any = None,
) -> TableRow:
    """The row of ``item``, which another project wrote; unknown columns get neutral values. Rows with the same ``opening``
    (by default the messages before the first answer) and tools, and the same ``group`` where the source has an id, are
    attempts at one task; ``reward``: a number, also as text, or null; ``turns``: its token data, none by default;
    ``known_as``: the id that its source gave the rollout, which is one and the same wherever it has the same tokens. Raises
    BadItem."""
    prompt = prompt_group(opening or given(messages), tools)
    turns, content = turns or TurnEncoder(), refuse_surrogates(item)
    if turns.turns and known_as is not None:
        content = json.dumps([known_as, [turn["digest"] for turn in turns.turns]]).encode()
    names = group or prompt, prompt if group else ""
    group, index = importing.numbering.of_content(content, *names, has_ids=bool(turns.turns))
    return {
        "rollout_id": rollout_id_of(importing.run_id, group, index),
        "run_id": importing.run_id,
        "task_id": group,
        "group_id": group,
        "rollout_index": index,
        "policy": policy,
        "policy_hash": f"served:{policy}",
        "policy_version": 0,
        "status": "completed",
        "stop_reason": None,
        "finish_reason": turns.turns[-1]["finish_reason"] if turns.turns else None,
        "reward": score(reward, "reward"),
        "rewards": {},
        "temperature": 1.0,
        "tools": tools,
        "task": STRICT.encode({"task_id": group}),
        "extra": "{}",
        "started_at": started_at or NO_TIME.isoformat(),
        "duration_s": duration_s,
        "messages": messages,
        **turns.columns(),
    }


def without_reward(row: TableRow, failure: Failure) -> TableRow:
    """``row`` without its rewards, which measure nothing because of ``failure``; its numbers stay in ``extra``."""
    rewards = row["rewards"] if isinstance(row["rewards"], dict) else {r["name"]: r["value"] for r in row["rewards"]}
    extra = json.loads(row["extra"]) | masked_extra(failure, {"reward": row["reward"], "rewards": rewards})
    return row | {"reward": None, "rewards": {}, "extra": encode(extra).decode()}


def unread_row(item: Any, importing: Importing) -> TableRow:
    """The row of a failed attempt whose messages cannot be read: ``extra`` has it as it is."""
    return foreign_row(item, [], importing) | {"extra": encode({"source": item}).decode()}


def given(messages: Sequence[Message]) -> list[Message]:
    """The messages before the first answer: before the first of the assistant that is trained."""
    return list(takewhile(lambda m: m["role"] != "assistant" or m.get("extra") == NOT_TRAINED, messages))


def prompt_group(prompt: Sequence[Message], tools: str) -> str:
    """Answers to one prompt with the same tools (JSON text) are a group: a hash of all that was given."""
    messages = [{name: m[name] for name in _READ if m.get(name) is not None} for m in prompt]
    text = json.dumps([messages, tools], ensure_ascii=False)
    return "prompt-" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def refuse_surrogates(value: Any) -> bytes:
    """``value`` as JSON. Raises BadItem for text that no output file can hold."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadItem("S101", "text with a lone surrogate, which is not Unicode") from None


def number_or_none(value: Any) -> float | None:
    """A JSON number; a whole one that no float can hold is infinite."""
    return as_float(value) if type(value) in (int, float) else None
