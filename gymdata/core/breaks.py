"""How each turn of one rollout relates to the turns before it: continues, retry, branch, out of order, or a break.

What always holds: only rollouts in which some turn does not continue its parent come here, so this may be slower than the
checks of whole batches; a break's position is the length of what is still shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gymdata.core import tokens


@dataclass(frozen=True, slots=True)
class Relation:
    """A turn that does not simply continue the one before: its code, place and what stood there."""

    code: str
    turn: int
    position: int | None = None
    expected: str | None = None
    got: str | None = None
    detail: str | None = None

    def place(self) -> dict[str, Any]:
        """The fields of a violation."""
        return {
            "turn": self.turn,
            "position": self.position,
            "expected": self.expected,
            "got": self.got,
            "detail": self.detail,
        }


def relations(turns: Sequence[Mapping[str, Any]]) -> list[Relation]:
    """T200 (or its cause), T208, T210 (prefix not the longest) and T211 of one rollout's turns.

    ``turns`` are expandable: parents come earlier and prefix lengths fit.
    """
    prompts = tokens.expand_prompts(turns, check_digests=False)
    found = []
    for index, kind in enumerate(tokens.kinds(turns, prompts)):
        if kind in ("first", "continues"):
            continue
        turn, prompt = turns[index], prompts[index]
        parent, shared = int(turn["parent"]), int(turn["prefix_length"])
        above = np.concatenate((prompts[parent], turns[parent]["generation_token_ids"]))
        if shared < min(len(above), len(prompt)) and above[shared] == prompt[shared]:
            longest = tokens.common_prefix(above, prompt)
            found.append(
                Relation(
                    "T210",
                    index,
                    expected=f"prefix_length {longest}",
                    got=f"prefix_length {shared}",
                    detail="not longest",
                )
            )
        elif later := _sampled_before(turns, prompts, index):
            found.append(Relation("T208", index, detail=f"turn {later} already holds this turn in its prompt"))
        elif kind == "break":
            found.append(
                Relation(
                    classify_break(above, prompt, shared),
                    index,
                    shared,
                    window(above, shared),
                    window(prompt, shared),
                    f"differs from turn {parent}'s prompt and generation",
                )
            )
        else:
            found.append(Relation("T211", index, detail=f"{kind} of turn {parent}"))
    return found


def classify_break(before: tokens.Ids, prompt: tokens.Ids, position: int) -> str:
    """The code of a break: ``before`` is H of the parent, ``prompt`` what came instead, equal up to ``position``.

    Without decoded text no cause can be told from another, so the answer is T200.
    """
    del before, prompt, position
    return "T200"


def window(ids: tokens.Ids, position: int, width: int = 8) -> str:
    """The ids from ``position`` on, for people; "the end" when there are none."""
    part = ids[position : position + width].tolist()
    return " ".join(map(str, part)) + (" …" if len(ids) > position + width else "") if part else "the end"


def _sampled_before(turns: Sequence[Mapping[str, Any]], prompts: Sequence[tokens.Ids], index: int) -> int | None:
    """An earlier turn whose prompt begins with this turn's prompt ++ generation: it was sampled after this one."""
    generation = np.asarray(turns[index]["generation_token_ids"], np.int32)
    if not len(generation):
        return None
    whole = np.concatenate((prompts[index], generation))
    for other in range(1, index):
        if len(prompts[other]) >= len(whole) and np.array_equal(prompts[other][: len(whole)], whole):
            return other
    return None
