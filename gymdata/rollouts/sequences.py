"""Rollouts as token sequences, a whole batch at a time: the tokens as the model saw them, and the sampled ones apart.

Invariants: every sampled token that is kept is trained in exactly one sequence; the sampled tokens of a rollout are
also kept together in turn order, which is how credit is given, whatever sequences they are cut into; every turn's
digest was checked. ``gymdata.rollouts.turns.chains`` defines the cut; rollouts that are one chain take no loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError, abridged
from gymdata.rollouts.messages import loads, object_of
from gymdata.rollouts.ragged import Array, Ints, Ragged, list_parts, offsets_of, places
from gymdata.rollouts.schema import HEAD
from gymdata.rollouts.soundness import refuse_unsound_turns
from gymdata.rollouts.turn_columns import ArrowTexts, TurnColumns
from gymdata.rollouts.turns import MAIN, chains, expand_prompts

#: Whether unread turns are trained.
Abandoned = Literal["keep", "drop"]
_COLUMNS = ("token_ids", "loss_mask", "logprobs")
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sequences:
    """n token sequences. ``token_ids`` int32; beside them ``loss_mask`` int8 (1 = trained) and ``logprobs`` float32, the
    sampler's (0 where not trained)."""

    token_ids: Ragged
    loss_mask: Ragged
    logprobs: Ragged

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def lengths(self) -> Ints:
        return self.token_ids.lengths

    @cached_property
    def is_trained(self) -> Bools:
        """Which tokens are trained, flat."""
        return np.asarray(self.loss_mask.values != 0)

    def take(self, rows: Array) -> Self:
        """The sequences at ``rows`` (int array), in that order."""
        return self._select(rows, self.lengths[rows])

    def cut(self, max_length: int) -> Self:
        """Every sequence's first ``max_length`` tokens."""
        return self._select(np.arange(len(self)), np.minimum(self.lengths, max_length))

    def _select(self, rows: Array, lengths: Ints) -> Self:
        indices, offsets = places(self.token_ids.offsets[rows], lengths)
        columns = {name: Ragged(getattr(self, name).values[indices], offsets) for name in _COLUMNS}
        return replace(self, **columns)


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of n rollouts, in turn order: ``token_ids`` and ``logprobs`` have one list per rollout.

    Turn t of all that are kept is the batch's turn ``turn[t]``, ends before ``turn_ends[t]``, belongs to rollout
    ``turn_rollout[t]`` and is its ``turn_number[t]``-th that is kept; ``turn_reward`` is NaN and ``turn_agent`` null where a
    turn has none. ``of_all``: where turns are left out, how many tokens each rollout sampled in all, and the places of
    these among the tokens of all.
    """

    token_ids: Ragged
    logprobs: Ragged
    turn: Ints
    turn_ends: Ints
    turn_rollout: Ints
    turn_reward: npt.NDArray[np.float64]
    turn_agent: pa.Array
    of_all: tuple[Ints, Ints] | None = None

    @cached_property
    def turn_sizes(self) -> Ints:
        return np.diff(self.turn_ends, prepend=0)

    @cached_property
    def turn_number(self) -> Ints:
        return np.arange(len(self.turn_ends)) - np.searchsorted(self.turn_rollout, self.turn_rollout)

    def of_agents(self, agents: Collection[str]) -> Bools:
        """Which tokens are of turns of these agents; ``main`` with its later versions and forks."""
        chosen = pc.is_in(self.turn_agent, value_set=pa.array(sorted(agents), pa.string()))
        if MAIN in agents:
            chosen = pc.or_(chosen, pc.fill_null(pc.starts_with(self.turn_agent, f"{MAIN}."), False))
        return np.repeat(chosen.to_numpy(zero_copy_only=False), self.turn_sizes)


@dataclass(frozen=True)
class RolloutSequences(Sequences):
    """The sequences of a batch of rollouts, in their order: sequence s is row ``rollout[s]``'s number ``index[s]``.

    ``turn_starts``: where its turns' generations begin, a list per sequence. The k-th trained token over all sequences is
    sampled token ``source[k]`` (None: token k). ``abandoned``: turns that are in no sequence. ``prompts``: what
    precedes each sequence's first generation, when it was requested apart; the sequences then begin after it.
    """

    rollout: Ints
    index: npt.NDArray[np.int32]
    turn_starts: Ragged
    sampled: SampledTokens
    source: Ints | None = None
    abandoned: int = 0
    prompts: Ragged | None = None

    def to_sequences(self, values: Array, dtype: Any = np.float32) -> Ragged:
        """One value per sampled token → one per token of the sequences, 0 where not trained."""
        full = np.zeros(len(self.token_ids.values), dtype)
        full[self.is_trained] = values if self.source is None else values[self.source]
        return self.token_ids.like(full)

    def in_turn_order(self, values: Array) -> Array:
        """One value per trained token of the sequences → one per sampled token, 0 where none of these trains it."""
        if self.source is None:
            return values
        result = np.zeros(len(self.sampled.logprobs.values), values.dtype)
        result[self.source] = values
        return result

    def restricted(self, tokens: Bools) -> Self:
        """Training only the sampled tokens that are true in ``tokens``; the others become context."""
        mask = self.to_sequences(tokens, np.int8)
        source = self._source()[mask.values[self.is_trained] != 0]
        logprobs = self.logprobs.like(np.where(mask.values, self.logprobs.values, np.float32(0)))
        return replace(self, loss_mask=mask, logprobs=logprobs, source=source)

    def take(self, rows: Array) -> Self:
        """The sequences at ``rows`` (int array), in that order; ``sampled`` stays the whole batch's."""
        source = Ragged(self._source(), offsets_of(self.loss_mask.sums(self.is_trained))).take(rows).values
        sequences = super().take(rows)
        prompts = None if self.prompts is None else self.prompts.take(rows)
        return replace(
            sequences,
            rollout=self.rollout[rows],
            index=self.index[rows],
            turn_starts=self.turn_starts.take(rows),
            source=source,
            prompts=prompts,
        )

    def _source(self) -> Ints:
        return np.arange(len(self.sampled.logprobs.values)) if self.source is None else self.source


def require_agents(turns: Iterable[pa.ListArray], agents: Collection[str], where: str) -> None:
    """Raises RefusedError unless every one of ``agents`` has a turn in the columns ``turns``."""
    if not agents:
        return
    names = {name for column in turns for name in pc.unique(column.flatten().field("agent")).to_pylist()}
    missing = sorted(set(agents) - names)
    if missing:
        listed = ", ".join(sorted(name for name in names if name)) or "none is named"
        raise RefusedError(f"{where}: no turn is of agent {abridged(missing)}", hint=f"agents there: {listed}")


def stitch(
    turns: pa.ListArray,
    rollout_ids: pa.Array,
    abandoned: Abandoned = "keep",
    extra: pa.Array | None = None,
    *,
    where: str = "",
    vocab_size: int | None = None,
    prompts_apart: bool = False,
    rendered: bool = False,
    ratios: bool = True,
) -> RolloutSequences:
    """The sequences of a batch of rollouts (the column of that name, one chunk).

    ``rollout`` numbers the rows of the batch. ``abandoned``: whether unread turns are trained, which are retries that the
    conversation did not continue, and ``unread_turns`` of the column ``extra``; ``prompts_apart``: see
    ``RolloutSequences``; ``rendered``: whether ids may be rendered from text (their log-probabilities are NaN);
    ``ratios``: whether log-probabilities are needed, else a rollout may have none that are known. Raises
    RefusedError (T206, T213, L301 to L303; see ``refuse_unsound_turns``), and DataError (T209, T210) for changed or
    impossible turns, naming ``where`` (the file), rollout and turn.
    """
    flat = TurnColumns.of(turns)
    refuse_unsound_turns(flat, rollout_ids, where, vocab_size, rendered=rendered, ratios=ratios)
    flat.refuse_altered(rollout_ids)
    simple, unread = flat.one_chain(), _unread_turns(extra)
    simple[list(unread)] = False
    if simple.all():
        # Every rollout is one chain, so deltas and generations simply follow each other.
        pieces = _Pieces(np.arange(len(simple)), np.zeros(len(simple), np.int32), flat.offsets, flat.delta)
    else:
        pieces = _cut(flat, simple, abandoned, unread)
    if not prompts_apart:
        return _stitched(flat, pieces)
    opens = np.zeros(len(pieces.context), np.bool_)
    opens[pieces.bounds[:-1]] = True
    lengths, of_prompt = pieces.context.lengths, pieces.context.spread(opens)
    rest = pieces.context.only(~of_prompt, np.where(opens, 0, lengths))
    prompts = pieces.context.only(of_prompt, lengths[opens])
    return replace(_stitched(flat, replace(pieces, context=rest)), prompts=prompts)


@dataclass(frozen=True)
class _Pieces:
    """Sequences as pieces, each some context and what one turn sampled: sequence s has pieces ``bounds[s]`` to
    ``bounds[s + 1]``. ``turn``: the turn of each piece (None: all of them, in order); ``trained`` None: all are."""

    rollout: Ints
    index: npt.NDArray[np.int32]
    bounds: Ints
    context: Ragged
    turn: Ints | None = None
    trained: Bools | None = None


def _unread_turns(extra: pa.Array | None) -> dict[int, Collection[int]]:
    """The unread turns of each rollout whose recorder names some."""
    if extra is None:
        return {}
    marked = np.flatnonzero(pc.fill_null(pc.match_substring(extra, '"unread_turns"'), False))
    named = {int(row): object_of(loads(extra[int(row)].as_py())).get("unread_turns") for row in marked}
    return {row: turns for row, turns in named.items() if isinstance(turns, list)}


def _cut(flat: TurnColumns, simple: Bools, abandoned: Abandoned, unread: Mapping[int, Collection[int]]) -> _Pieces:
    """Rollouts with breaks, branches or retries, one at a time, between those that are one chain."""
    chosen = np.flatnonzero(simple)
    sizes = np.diff(flat.offsets)[chosen]
    simple_turns, _ = places(flat.offsets[chosen], sizes)
    rollout, index, lengths, turn, trained = [], [], [], [], []
    context: list[Array] = []
    for row in np.flatnonzero(~simple).tolist():
        structs, first = flat.structs(row), int(flat.offsets[row])
        prompts = expand_prompts(structs, check_digests=False)
        for number, chain in enumerate(chains(structs, prompts, abandoned, unread.get(row, ()))):
            rollout.append(row)
            index.append(number)
            lengths.append(len(chain.turns))
            trained += chain.trained
            n_context = 0
            for k in chain.turns:
                context.append(prompts[k][n_context:])
                turn.append(first + k)
                n_context = len(prompts[k]) + len(structs[k]["generation_token_ids"])

    def concat(simple_values: Array, chain_values: list[Any]) -> Array:
        return np.concatenate((simple_values, np.array(chain_values, simple_values.dtype)))

    rollouts = concat(chosen, rollout)
    order = np.argsort(rollouts, kind="stable")
    pieces = Ragged(np.arange(len(simple_turns) + len(turn)), offsets_of(concat(sizes, lengths))).take(order)
    contexts = Ragged.joined([flat.delta, Ragged.of_arrays(context, np.int32)])
    return _Pieces(
        rollout=rollouts[order],
        index=concat(np.zeros(len(chosen), np.int32), index)[order],
        bounds=pieces.offsets,
        context=contexts.take(concat(simple_turns, list(range(len(flat), len(contexts))))[pieces.values]),
        turn=concat(simple_turns, turn)[pieces.values],
        trained=concat(np.ones(len(simple_turns), np.bool_), trained)[pieces.values],
    )


def _stitched(flat: TurnColumns, pieces: _Pieces) -> RolloutSequences:
    """Contexts and generations of the pieces one after the other, and the tokens that are trained in some piece."""
    generation = flat.generation if pieces.turn is None else flat.generation.take(pieces.turn)
    tokens, part = Ragged.interleaved([pieces.context, generation])
    is_sampled, token_ids = part.view(np.bool_), tokens.grouped(pieces.bounds)
    mask, turns, source = is_sampled, None, None
    if pieces.turn is not None and pieces.trained is not None:
        if not pieces.trained.all():
            mask = is_sampled & tokens.spread(pieces.trained)
        trained_turns = pieces.turn[pieces.trained]
        turns = np.sort(trained_turns)
        begin = offsets_of(flat.generation.lengths[turns])[:-1][np.searchsorted(turns, trained_turns)]
        source, _ = places(begin, flat.generation.lengths[trained_turns])
    sampled = _sampled(flat, turns)
    logprobs = np.zeros(len(is_sampled), np.float32)
    logprobs[mask] = sampled.logprobs.values if source is None else sampled.logprobs.values[source]
    starts = tokens.offsets[:-1] + pieces.context.lengths - np.repeat(token_ids.offsets[:-1], np.diff(pieces.bounds))
    return RolloutSequences(
        token_ids,
        token_ids.like(mask.view(np.int8)),
        token_ids.like(logprobs),
        rollout=pieces.rollout,
        index=pieces.index,
        turn_starts=Ragged(starts.astype(np.int32), pieces.bounds),
        sampled=sampled,
        source=source,
        abandoned=0 if turns is None else len(flat) - len(turns),
    )


def _sampled(flat: TurnColumns, turns: Ints | None) -> SampledTokens:
    """The sampled tokens of ``turns`` (numbers, rising; None: all)."""
    agent = flat.agent.array if isinstance(flat.agent, ArrowTexts) else pa.nulls(len(flat), pa.string())
    reward = flat.reward if flat.reward is not None else np.full(len(flat), np.nan)
    token_ids, logprobs, rollout, bounds = flat.generation, flat.logprobs, flat.rollout, flat.offsets
    of_all = None
    if turns is not None:
        kept, _ = places(flat.generation.offsets[turns], flat.generation.lengths[turns])
        of_all = flat.generation.grouped(flat.offsets).lengths, kept
        token_ids, logprobs, rollout = token_ids.take(turns), logprobs.take(turns), rollout[turns]
        bounds, reward, agent = (
            np.searchsorted(rollout, np.arange(len(bounds))),
            reward[turns],
            agent.take(pa.array(turns)),
        )
    lists = token_ids.grouped(bounds), logprobs.grouped(bounds)
    numbers = np.arange(len(flat)) if turns is None else turns
    return SampledTokens(*lists, numbers, token_ids.offsets[1:], rollout, reward, agent, of_all)


def alternatives(turns: pa.ListArray, sampled: SampledTokens) -> tuple[Ragged, Ragged]:
    """``heads_of`` the turns of ``sampled``, which was stitched from the column ``turns``: one list per sampled token, in
    turn order."""
    return heads_of(turns, sampled.turn, sampled.turn_sizes)


def head_columns(sequences: RolloutSequences, turns: pa.ListArray) -> dict[str, pa.ListArray]:
    """The columns ``HEAD``: for each token of ``sequences``, which were stitched from ``turns``, its saved alternatives;
    none where it is not trained."""
    columns = {}
    for name, of_sampled in zip(HEAD, alternatives(turns, sequences.sampled), strict=True):
        lengths = sequences.to_sequences(of_sampled.lengths, np.int64)
        trained = of_sampled if sequences.source is None else of_sampled.take(sequences.source)
        per_token = Ragged(trained.values, offsets_of(lengths.values)).to_arrow()
        columns[name] = pa.ListArray.from_arrays(lengths.offsets.astype(np.int32), per_token)
    return columns


def heads_of(turns: pa.ListArray, numbers: Ints, sizes: Ints) -> tuple[Ragged, Ragged]:
    """Ids (int32) and log-probs (float32) of the most likely tokens at the place of each sampled token of some turns of a
    column, in order: one list per token, empty where its turn holds none. ``numbers``: which turns of all; ``sizes``: their
    sampled tokens. Raises DataError where a turn has other than one list per token."""
    bounds, struct = list_parts(turns)
    names = [f.name for f in struct.type]
    if "top_log_probs" not in names or struct.field("top_log_probs").null_count == len(struct):
        none = np.zeros(int(sizes.sum()) + 1, np.int64)
        return Ragged(np.empty(0, np.int32), none), Ragged(np.empty(0, np.float32), none)
    per_turn, inner = list_parts(struct.field("top_log_probs"))
    per_token, pairs = list_parts(inner)
    n_lists = np.diff(per_turn)[numbers]
    odd = np.flatnonzero((n_lists != sizes) & (n_lists > 0))
    if len(odd):
        turn = int(odd[0])
        row, of_row = Ragged(np.empty(0), bounds).locate(int(numbers[turn]))
        raise DataError(
            f"top_log_probs of turn {of_row} of row {row}: got {n_lists[turn]} lists, expected one per sampled token, "
            f"{sizes[turn]}"
        )
    # A turn without lists takes those of an empty token, added at the end.
    lists = Ragged(np.arange(len(pairs)), np.append(per_token, per_token[-1]))
    indices, _ = places(per_turn[:-1][numbers], sizes)
    chosen = lists.take(np.where(np.repeat(n_lists > 0, sizes), indices, len(lists) - 1))
    columns = (pairs.field(name).to_numpy(zero_copy_only=False) for name in ("id", "log_prob"))
    ids, logprobs = (Ragged(values[chosen.values], chosen.offsets) for values in columns)
    return ids, logprobs
