"""Repairing rollouts with faults: which turns are kept, and in how many rollouts.

Invariants: no token is invented or changed, turns are only left out or put into a rollout of their own; every cost
is counted; what is kept has no errors left. ``split`` starts a new rollout at a break, ``truncate`` keeps the head before
the first fault, ``drop`` removes the rollout. A turn with another fault than a break cannot be trained, so ``split``, too,
keeps only what comes before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gymdata.checks.violations import BREAKS, Violation
from gymdata.public import Report, Row
from gymdata.rollouts import turns as tokens
from gymdata.rollouts.messages import Message, RolloutRow

Choice = Literal["split", "truncate", "drop"]
CHOICES: tuple[Choice, ...] = ("split", "truncate", "drop")


@dataclass(slots=True)
class Cost:
    """The cost of one choice over all rollouts with errors."""

    rollouts_removed: int = 0
    rollouts_shortened: int = 0
    rollouts_split: int = 0
    rollouts_after: int = 0
    turns_lost: int = 0
    generated_tokens_lost: int = 0

    def count(self, sizes: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
        """One rollout with ``sizes`` generated tokens per turn, of which ``parts`` are kept."""
        kept_turns = {turn for part in parts for turn in part}
        self.rollouts_after += len(parts)
        self.rollouts_removed += not parts
        self.rollouts_split += len(parts) > 1
        self.rollouts_shortened += bool(parts) and len(kept_turns) < len(sizes)
        self.turns_lost += len(sizes) - len(kept_turns)
        self.generated_tokens_lost += sum(n for turn, n in enumerate(sizes) if turn not in kept_turns)


@dataclass(slots=True, repr=False)
class FixReport(Report):
    """The repairs, and what each choice would have cost."""

    path: str
    output: str
    choice: Choice
    rollouts_in: int = 0
    rollouts_out: int = 0
    rollouts_with_errors: int = 0
    rows_unreadable: int = 0
    errors_after: int = 0
    by_code: dict[str, int] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=lambda: {c: Cost() for c in CHOICES})
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether rollouts are left, and no errors."""
        return self.rollouts_out > 0 and not self.errors_after

    def rows(self) -> list[Row]:
        left_out: list[Row] = [("rows that could not be read, left out", self.rows_unreadable)]
        return [
            ("rollouts with errors", f"{self.rollouts_with_errors:,} of {self.rollouts_in:,}"),
            *(left_out if self.rows_unreadable else ()),
            ("rollouts written", self.rollouts_out),
            ("errors left", self.errors_after),
            ("written to", self.output),
        ]


def plan(turns: int, roots: Sequence[int], faults: Iterable[Violation], choice: Choice) -> list[list[int]]:
    """Turns to keep, a list for each rollout that comes out; none when nothing can be kept.

    ``roots``: the turn at which each turn's unbroken chain began, of the turns before the first that cannot be expanded.
    ``faults``: the errors of one rollout. A fault without a turn is the whole rollout's.
    """
    turn_of = [(v.code, -1 if v.turn is None else v.turn) for v in faults]
    if choice == "drop" or any(not 0 <= turn < turns for _, turn in turn_of):
        return []
    ends = BREAKS if choice == "split" else ()
    head = min([len(roots), *(turn for code, turn in turn_of if code not in ends)])
    chains: dict[int, list[int]] = {}
    for turn in range(head):
        chains.setdefault(roots[turn] if choice == "split" else 0, []).append(turn)
    return list(chains.values())


def chain_roots(turns: Sequence[tokens.Turn]) -> list[int]:
    """For each turn, the turn at which its unbroken chain began: itself where it breaks."""
    prompts = tokens.expand_prompts(turns, check_digests=False)
    roots: list[int] = []
    for index, kind in enumerate(tokens.kinds(turns, prompts)):
        parent = int(turns[index]["parent"])
        roots.append(index if parent < 0 or kind == "break" else roots[parent])
    return roots


def parts_of(row: RolloutRow, keep: Sequence[Sequence[int]]) -> list[RolloutRow]:
    """The rollouts that come out of a rollouts row; the row itself when all of it is kept.

    Several parts get ids of their own (``ID-part1`` …); ``extra`` is the caller's to fill.
    """
    turns = row["turns"]
    if len(keep) == 1 and len(keep[0]) == len(turns):
        return [dict(row)]
    # Turns that cannot be expanded come after all that are kept.
    last = max(turn for part in keep for turn in part)
    prompts = tokens.expand_prompts(turns[: last + 1], check_digests=False)
    result = []
    for index, part in enumerate(keep):
        encoder = tokens.TurnEncoder()
        for turn in part:
            encoder.add(tokens.call_of(row["turns"][turn], prompts[turn]))
        complete = len(part) == len(row["turns"])
        cut = part[-1] < len(row["turns"]) - 1
        repaired = {
            **row,
            **encoder.columns(),
            # The row's are of all its turns; they are computed where a row has none.
            "prompt_hash": None,
            "generation_hash": None,
            "messages": row["messages"] if complete else part_messages(row["messages"], part, cut),
            "status": "truncated" if cut else row["status"],
            "stop_reason": "fixed" if cut else row["stop_reason"],
        }
        if len(keep) > 1:
            repaired["rollout_id"] = f"{row['rollout_id']}-part{index + 1}"
        result.append(repaired)
    return result


def part_messages(messages: Sequence[Message], part: Sequence[int], cut: bool) -> list[Message]:
    """The conversation up to what the part's last turn wrote, turns renumbered; to its end when nothing was cut."""
    number = {turn: index for index, turn in enumerate(part)}
    last = max((i for i, m in enumerate(messages) if m.get("turn") == part[-1]), default=len(messages) - 1)
    selected = messages[: last + 1] if cut else messages
    return [{**m, "turn": number.get(m["turn"]) if m.get("turn") is not None else None} for m in selected]
