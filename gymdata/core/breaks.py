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
from gymdata.core.causes import Reader, cause_of_break, evidence


@dataclass(frozen=True, slots=True)
class Relation:
    """A turn that does not simply continue the one before: its code, place and what stood there."""

    code: str
    turn: int
    position: int | None = None
    expected: str | None = None
    got: str | None = None
    detail: str | None = None
    #: Of a break: ids and texts of the differing spans.
    evidence: dict[str, Any] | None = None

    def place(self) -> dict[str, Any]:
        """The fields of a violation."""
        return {
            "turn": self.turn,
            "position": self.position,
            "expected": self.expected,
            "got": self.got,
            "detail": self.detail,
            "evidence": self.evidence,
        }


def relations(turns: Sequence[Mapping[str, Any]], reader: Reader | None = None) -> list[Relation]:
    """T200 (or its cause), T208, T210 (prefix not the longest) and T211 of one rollout's turns.

    ``turns`` are expandable: parents come earlier and prefix lengths fit. ``reader`` is asked for what decodes ids when
    there is a break.
    """
    prompts = tokens.expand_prompts(turns, check_digests=False)
    found = []
    for index, kind in enumerate(tokens.kinds(turns, prompts)):
        # A turn without a prompt breaks nothing; that it has none is a fault of its own.
        if kind in ("first", "continues") or not len(prompts[index]):
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
        elif (later := _sampled_before(turns, prompts, index)) is not None:
            found.append(Relation("T208", index, detail=f"turn {later} already holds this turn in its prompt"))
        elif kind == "break":
            found.append(_break(turns, prompts, index, above, reader))
        else:
            found.append(Relation("T211", index, detail=f"{kind} of turn {parent}"))
    return found


def _break(
    turns: Sequence[Mapping[str, Any]],
    prompts: Sequence[tokens.Ids],
    index: int,
    before: tokens.Ids,
    reader: Reader | None,
) -> Relation:
    """The break of turn ``index``, with its cause; ``before`` is H of the parent."""
    prompt, parent = prompts[index], int(turns[index]["parent"])
    position = int(turns[index]["prefix_length"])
    reading = reader() if reader is not None else None
    cause = cause_of_break(before, prompt, position, generations(turns, prompts, parent), reading)
    return Relation(
        cause.code,
        index,
        position,
        window(before, position),
        window(prompt, position),
        f"differs from turn {parent}'s prompt and generation",
        evidence(before, prompt, cause, reading),
    )


def generations(turns: Sequence[Mapping[str, Any]], prompts: Sequence[tokens.Ids], turn: int) -> list[tuple[int, int]]:
    """Where sampled tokens lie in the prompt ++ generation of ``turn``: (start, end) in rising order."""
    found = []
    shared = len(prompts[turn]) + len(turns[turn]["generation_token_ids"])
    while turn >= 0:
        start = len(prompts[turn])
        end = min(start + len(turns[turn]["generation_token_ids"]), shared)
        if start < end:
            found.append((start, end))
        shared = min(shared, int(turns[turn]["prefix_length"]))
        turn = int(turns[turn]["parent"])
    return found[::-1]


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
    for other in range(index):
        if len(prompts[other]) >= len(whole) and np.array_equal(prompts[other][: len(whole)], whole):
            return other
    return None
