"""Preference pairs from scores (rewards, re-scoring, aggregated comparisons), and pairs that begin where two rollouts part.

Invariants: both sides of a pair come from one group and one prompt; the chosen one scored higher by more than the
margin; ties, missing scores and equal answers never make a pair; every candidate is either a pair or counted under the
one reason that dropped it; the order of the rows changes nothing. At a fork prompt ++ chosen and prompt ++ rejected are
what they were; both sides keep at least one generated token, and only what both share moves to the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gymdata.commands.pairs.groups import Groups, ranks, run_starts
from gymdata.commands.pairs.strategies import STRATEGIES
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.rollouts.ragged import Array, Ints, Ragged, first_like

#: Two scores closer than this are equal; a margin must beat the wanted one by more than this.
TOLERANCE = 1e-9
#: Why a candidate is no pair, in the order in which the reasons are looked at.
REASONS = (
    "tie", "margin", "not_in_both_positions", "order_flipped", "against_comparisons", "undecided", "other_prompt",
    "identical", "nothing_generated", "several_sequences", "truncated", "contradictory", "duplicate", "over_the_cap",
    "length_balance",
)  # fmt: skip


@dataclass(slots=True)
class PairCounts:
    """Counts of rollouts, groups and candidates. ``candidates`` = ``pairs`` + all of ``dropped``; ``groups`` =
    ``groups_too_small`` + ``groups_without_variance`` + ``groups_paired`` + ``groups_all_dropped``. ``abandoned_turns``: of
    the rollouts in pairs, retries that no later turn continues; their tokens are left out."""

    rollouts: int = 0
    rollouts_unscored: int = 0
    groups: int = 0
    groups_too_small: int = 0
    groups_without_variance: int = 0
    groups_paired: int = 0
    groups_all_dropped: int = 0
    candidates: int = 0
    pairs: int = 0
    abandoned_turns: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected pairs as row numbers of the frame, sorted by (group, margin from large, rollout indices)."""

    chosen: Ints
    rejected: Ints
    margin: npt.NDArray[np.float64]
    counts: PairCounts


def select_pairs(
    frame: pa.Table,
    strategy: str = "best-worst",
    *,
    min_margin: float = 0.0,
    max_per_task: int | None = None,
    length_balance: float | None = None,
    truncated: Literal["keep", "drop"] = "keep",
    duplicates: Literal["keep", "drop"] = "drop",
    seed: int = 0,
    reject: Callable[[Ints, Ints], list[tuple[str, npt.NDArray[np.bool_]]]] | None = None,
) -> Selection:
    """Pairs of rows of ``frame``.

    Columns: group_id, rollout_id, task_id (strings), rollout_index, score (float, null = not scored), and optionally
    prompt_key, generation_key, text_key (equal hash = equal content; 0 = not known), content_key (equal =
    equal prompt and completion ids), n_sequences, n_generated_tokens, truncated (bool). A rule whose column is absent does
    not apply.

    Of pairs with the same content on both sides, wherever they come from, the one with the widest margin is kept, unless
    ``duplicates`` is ``keep``.

    ``max_per_task`` keeps the widest margins; ``length_balance`` is the largest allowed share of pairs whose chosen side
    is the longer one, among pairs of unequal length: the narrowest margins go first. Both act on finished pairs.
    ``reject`` names, for (chosen, rejected) rows, what speaks against each pair, by reason.
    """
    ordered = Groups(frame, seed)
    counts = _counts(ordered)
    pairs = _Candidates(frame, ordered, *_chosen_by(strategy, ordered), counts)
    _refuse_far_apart(frame, pairs)
    counts.candidates = len(pairs.first)
    pairs.drop("tie", pairs.margin <= TOLERANCE)
    pairs.drop("margin", pairs.margin <= min_margin + TOLERANCE)
    pairs.compact()
    if reject is not None:
        for reason, bad in reject(pairs.chosen.astype(np.int64), pairs.rejected.astype(np.int64)):
            pairs.drop(reason, bad)
    pairs.drop_by_content(truncated)
    if duplicates == "drop":
        pairs.drop_duplicates()
    pairs.cap(max_per_task)
    pairs.balance(length_balance, seed)
    pairs.compact()
    groups = ordered.group[pairs.first]
    order = np.argsort(groups, kind="stable")
    counts.pairs = len(order)
    counts.groups_paired = len(run_starts(groups[order]))
    counts.groups_all_dropped = (
        counts.groups - counts.groups_too_small - counts.groups_without_variance - counts.groups_paired
    )
    chosen, rejected = (side[order].astype(np.int64) for side in (pairs.chosen, pairs.rejected))
    return Selection(chosen, rejected, pairs.margin[order], counts)


def _counts(groups: Groups) -> PairCounts:
    """Rollouts and groups, before anything is chosen."""
    enough = groups.size >= 2
    start, last = groups.start[enough], (groups.start + groups.size - 1)[enough]
    with np.errstate(over="ignore"):
        without_variance = int((groups.score[start] - groups.score[last] <= TOLERANCE).sum())
    return PairCounts(
        rollouts=groups.total,
        rollouts_unscored=groups.total - len(groups.row),
        groups=groups.n_groups,
        groups_too_small=groups.n_groups - int(enough.sum()),
        groups_without_variance=without_variance,
    )


def _chosen_by(name: str, groups: Groups) -> tuple[Array, Array]:
    """The candidates of a strategy as positions (better, worse) in ``groups``. Those of a group follow each other, from the
    widest margin, equal margins by rollout indices (lower, then higher)."""
    strategy = STRATEGIES[name]
    first, second = strategy.object(groups)
    if strategy.facts.get("ordered"):
        return first, second
    better, worse = np.minimum(first, second), np.maximum(first, second)
    if (groups.group[better] != groups.group[worse]).any() or (better == worse).any():
        raise UsageError(f"strategy {name!r} paired rollouts of two groups, or one with itself")
    a, b = groups.index[better], groups.index[worse]
    with np.errstate(over="ignore"):
        margin = groups.score[better] - groups.score[worse]
    order = np.lexsort((np.maximum(a, b), np.minimum(a, b), -margin, groups.group[better]))
    return better[order], worse[order]


def _refuse_far_apart(frame: pa.Table, pairs: _Candidates) -> None:
    far = np.flatnonzero(~np.isfinite(pairs.margin))
    if not len(far):
        return
    ordered, sides = pairs.ordered, [int(side[far[0]]) for side in (pairs.first, pairs.second)]
    names = [frame["rollout_id"][int(ordered.row[position])].as_py() for position in sides]
    scores = [f"{ordered.score[position]:g}" for position in sides]
    raise RefusedError(
        f"{counted(len(far), 'pair has', 'pairs have')} a margin beyond float64 (first: rollouts {names[0]} and "
        f"{names[1]}, scores {scores[0]} "
        f"and {scores[1]})",
        code="R502",
        hint="score on a smaller scale, or `gymdata filter --where 'abs(reward) < 1e100'`",
    )


class _Candidates:
    """Candidates, as positions (better, worse) in ``ordered``, and which of them are still pairs; each is dropped at most
    once, for the first reason met."""

    def __init__(self, frame: pa.Table, ordered: Groups, first: Array, second: Array, counts: PairCounts) -> None:
        self.frame, self.ordered, self.first, self.second, self.counts = frame, ordered, first, second, counts
        self.alive = np.ones(len(first), dtype=bool)

    @property
    def chosen(self) -> Array:
        return self.ordered.row[self.first]

    @property
    def rejected(self) -> Array:
        return self.ordered.row[self.second]

    @property
    def margin(self) -> npt.NDArray[np.float64]:
        difference: npt.NDArray[np.float64] = self.ordered.score[self.first]
        with np.errstate(over="ignore"):
            difference -= self.ordered.score[self.second]
        return difference

    def compact(self) -> None:
        """Forget those that were dropped."""
        self.first, self.second = self.first[self.alive], self.second[self.alive]
        self.alive = np.ones(len(self.first), dtype=bool)

    def drop(self, reason: str, bad: npt.NDArray[np.bool_]) -> None:
        self.counts.dropped[reason] += int((self.alive & bad).sum())
        self.alive &= ~bad

    def column(self, name: str) -> np.ndarray | None:
        if name not in self.frame.column_names:
            return None
        column = pc.fill_null(self.frame[name], False if pa.types.is_boolean(self.frame[name].type) else 0)
        values: np.ndarray = column.to_numpy()
        return values

    def drop_by_content(self, truncated: str) -> None:
        a, b = self.chosen, self.rejected
        prompt, generation, text = (self.column(n) for n in ("prompt_key", "generation_key", "text_key"))
        generated, sequences = self.column("n_generated_tokens"), self.column("n_sequences")
        cut = self.column("truncated")
        if sequences is not None:
            # First, because the keys of such a row are meaningless.
            self.drop("several_sequences", (sequences[a] != 1) | (sequences[b] != 1))
        if prompt is not None:
            self.drop("other_prompt", (prompt[a] != prompt[b]) & (prompt[a] != 0) & (prompt[b] != 0))
        if generation is not None:
            self.drop("identical", (generation[a] == generation[b]) & (generation[a] != 0))
        if text is not None:
            self.drop("identical", (text[a] == text[b]) & (text[a] != 0))
        if generated is not None:
            empty = generated == 0
            if generation is not None:
                # A rollout without ids is refused where it would be in a pair.
                empty &= generation != 0
            self.drop("nothing_generated", empty[a] | empty[b])
        if cut is not None and truncated == "drop":
            self.drop("truncated", cut[a] | cut[b])
        del a, b
        self.compact()
        bad = np.zeros(len(self.first), dtype=bool)
        for key in (generation, text):
            if key is not None:
                bad |= self._contradicted(key, prompt)
        self.drop("contradictory", bad)
        self.compact()

    def _contradicted(self, key: np.ndarray, prompt: np.ndarray | None) -> npt.NDArray[np.bool_]:
        """Pairs of two contents that another pair has the other way round, under the same prompt; all are alive."""
        kind = self.ordered.row.dtype
        content = (first_like(key) if prompt is None else first_like(prompt, key)).astype(kind)
        content[key == 0] = -1
        better, worse = content[self.chosen], content[self.rejected]
        usable = np.flatnonzero((better != worse) & (better >= 0) & (worse >= 0))
        better, worse = better[usable], worse[usable]
        # The same number for both ways, but for its last bit.
        way = np.minimum(better, worse).astype(np.uint64) << np.uint64(32)
        way |= np.maximum(better, worse).astype(np.uint64) << np.uint64(1)
        way |= (better > worse).astype(np.uint64)
        del better, worse
        ordered = np.sort(way)
        twins = ordered[1:][(ordered[1:] ^ ordered[:-1]) == 1]
        del ordered
        contradicted = np.zeros(len(self.first), dtype=bool)
        if len(twins):
            way |= np.uint64(1)
            nearest = np.minimum(np.searchsorted(twins, way), len(twins) - 1)
            contradicted[usable[twins[nearest] == way]] = True
        return contradicted

    def drop_duplicates(self) -> None:
        content = self.column("content_key")
        if content is None:
            return
        pair_key = content[self.chosen] * (int(content.max(initial=0)) + 1) + content[self.rejected]
        # The candidates are in an order that does not depend on the rows', so the kept copy does not either.
        order = np.lexsort((-self.margin, pair_key))
        pair_key = pair_key[order]
        copies = np.zeros(len(order), dtype=bool)
        copies[order[1:][pair_key[1:] == pair_key[:-1]]] = True
        self.drop("duplicate", copies)
        self.compact()

    def cap(self, most: int | None) -> None:
        if most is None:
            return
        ordered, first, second = self.ordered, self.first, self.second
        live = np.flatnonzero(self.alive)
        task, n_tasks = ranks(self.frame["task_id"])
        task = task[self.chosen[live]]
        order = np.arange(len(live))
        if n_tasks < ordered.n_groups:
            # A task with several groups: its candidates are not together yet.
            a, b = ordered.index[first[live]], ordered.index[second[live]]
            order = np.lexsort((np.minimum(a, b) << 32 | np.maximum(a, b), -self.margin[live], task))
        new = run_starts(task[order])
        rank = np.arange(len(task)) - np.repeat(new, np.diff(np.append(new, len(task))))
        over = np.zeros(len(self.alive), dtype=bool)
        over[live[order[rank >= most]]] = True
        self.drop("over_the_cap", over)

    def balance(self, share: float | None, seed: int) -> None:
        length = self.column("n_generated_tokens")
        if share is None or share >= 1 or length is None:
            return
        difference = length[self.chosen] - length[self.rejected]
        longer = np.flatnonzero(self.alive & (difference > 0))
        shorter = int((self.alive & (difference < 0)).sum())
        allowed = int(shorter * share / (1 - share) + TOLERANCE)
        ids = self.frame["rollout_id"]
        # Equal margins are common; drawing among them by hash keeps early tasks from being favoured.
        names = zip(ids.take(self.chosen[longer]).to_pylist(), ids.take(self.rejected[longer]).to_pylist(), strict=True)
        tie_break = np.array([xxhash.xxh3_64_intdigest(f"{a}\x1f{b}".encode(), seed) for a, b in names], np.uint64)
        out = np.zeros(len(self.alive), dtype=bool)
        out[longer[np.lexsort((tie_break, -self.margin[longer]))[allowed:]]] = True
        self.drop("length_balance", out)


def pair_id(chosen_rollout_id: str, rejected_rollout_id: str, source: str, score_name: str) -> str:
    """The same two rollouts preferred by the same score are the same pair; the other way round is another."""
    text = "\x1f".join((chosen_rollout_id, rejected_rollout_id, source, score_name))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def at_fork(table: pa.Table) -> pa.Table:
    """The pairs table with each prompt_ids ending at the fork; messages stay as they are."""
    lists = {
        side: {part: Ragged.of(table[f"{side}_{part}"]) for part in ("ids", "mask", "logprobs")}
        for side in ("chosen", "rejected")
    }
    compared = [lists[side][part] for side in ("chosen", "rejected") for part in ("ids", "mask")]
    # How many ids both sides begin with, such that each keeps a generated token.
    shared = np.zeros(table.num_rows, np.int64)
    for row in range(table.num_rows):
        chosen, chosen_mask, rejected, rejected_mask = (ragged[row] for ragged in compared)
        n = min(len(chosen), len(rejected))
        differs = np.flatnonzero(chosen[:n] != rejected[:n])
        last = [int(np.flatnonzero(mask)[-1]) if mask.any() else 0 for mask in (chosen_mask, rejected_mask)]
        shared[row] = min(int(differs[0]) if len(differs) else n, *last)
    prompt, _ = Ragged.interleaved([Ragged.of(table["prompt_ids"]), lists["chosen"]["ids"].first(shared)])
    columns = {"prompt_ids": prompt}
    for side, parts in lists.items():
        is_rest, lengths = ~parts["ids"].is_head(shared), parts["ids"].lengths - shared
        columns |= {f"{side}_{part}": ragged.only(is_rest, lengths) for part, ragged in parts.items()}
    for name, column in columns.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), column.to_arrow())
    return table
