"""Rollouts as training sequences, a whole batch at a time: the tokens as the model saw them, and the sampled ones apart.

Invariants: every sampled token that is kept is trained in exactly one sequence; the sampled tokens of a rollout
also stand together in turn order, which is how credit is given, whatever sequences they are cut into; every turn's digest
was checked. ``gymdata.rollouts.turns.sequences`` defines the cut; rollouts that are one chain take a form without loops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts import turns as tokens
from gymdata.rollouts.chains import FlatTurns, check_digests, turns_of
from gymdata.rollouts.soundness import refuse_unsound_turns


def require_agents(turns: Iterable[pa.ListArray], agents: Collection[str], where: str) -> None:
    """Raises RefusedError unless every one of ``agents`` has a turn in the columns ``turns``."""
    if not agents:
        return
    known = {name for column in turns for name in pc.unique(column.flatten().field("agent")).to_pylist()}
    missing = sorted(set(agents) - known)
    if missing:
        there = ", ".join(sorted(name for name in known if name)) or "none is named"
        raise RefusedError(f"{where}: no turn is of agent {', '.join(missing)}", hint=f"agents there: {there}")


_Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(slots=True)
class Stitched:
    """Sequences of n rollouts, flat, and their sampled tokens.

    Sequence s is row ``rollout[s]``'s number ``index[s]``: ``ids[starts[s]:starts[s + 1]]``, with ``mask`` where trained and
    ``turn_starts[turn_bounds[s]:turn_bounds[s + 1]]`` the places where its turns' generations begin. The k-th trained token
    over all sequences is sampled token ``source[k]`` (None: token k).

    Sampled tokens: rollout r has ``offsets[r]:offsets[r + 1]`` of ``log_probs``; turn t ends before
    ``turn_ends[t]`` and belongs to rollout ``turn_rollout[t]``; ``turn_reward`` is NaN and ``turn_agent`` null where a turn
    has none.
    """

    rollout: _Ints
    index: npt.NDArray[np.int32]
    starts: _Ints
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    source: _Ints | None
    turn_starts: npt.NDArray[np.int32]
    turn_bounds: _Ints
    offsets: _Ints
    log_probs: npt.NDArray[np.float32]
    turn_ends: _Ints
    turn_rollout: _Ints
    turn_reward: npt.NDArray[np.float64]
    turn_agent: pa.Array
    abandoned: int = 0

    def scatter_to_tokens(self, values: Array, dtype: Any = np.float32) -> Array:
        """One value a sampled token → one a token of the sequences, 0 on context."""
        full = np.zeros(len(self.ids), dtype)
        full[self.mask] = values if self.source is None else values[self.source]
        return full

    def agent_mask(self, agents: Collection[str]) -> npt.NDArray[np.bool_]:
        """Which sampled tokens are of turns of these agents."""
        return np.repeat(turns_of(self.turn_agent, agents), np.diff(self.turn_ends, prepend=0))


def stitch(
    turns: pa.ListArray,
    rollout_ids: pa.Array,
    abandoned: Literal["keep", "drop"] = "keep",
    *,
    where: str = "",
    vocab_size: int | None = None,
) -> list[Stitched]:
    """The rollouts of a batch (the column of that name, one chunk) in at most two parts: single chains, and the others.

    ``rollout`` numbers the rows of the batch. Raises DataError (T209, T210) for changed or impossible turns and
    RefusedError (T206, L301 to L303; see ``refuse_unsound_turns``), naming ``where`` (the file), rollout and turn.
    """
    flat = FlatTurns(turns)
    refuse_unsound_turns(flat, rollout_ids, where, vocab_size)
    simple = flat.is_one_chain()
    chosen, others = np.flatnonzero(simple), np.flatnonzero(~simple)
    parts = []
    if len(chosen) == len(simple):
        check_digests(flat, rollout_ids)
        parts.append(_chains(flat))
    elif len(chosen):
        some, ids = turns.take(pa.array(chosen)), rollout_ids.take(pa.array(chosen))
        sub = FlatTurns(some)
        check_digests(sub, ids)
        parts.append(_renumbered(_chains(sub), chosen, len(simple)))
    if len(others):
        parts.append(_cut(flat, others, rollout_ids, abandoned))
    return parts


def _chains(flat: FlatTurns) -> Stitched:
    """Every rollout is one chain, so deltas and generations simply follow each other."""
    n = len(flat.starts) - 1
    deltas, generations = np.diff(flat.delta_starts), np.diff(flat.generation_starts)
    sampled = np.repeat(np.tile(np.array([False, True]), len(deltas)), np.stack((deltas, generations), axis=1).ravel())
    ids = np.empty(len(sampled), np.int32)
    ids[~sampled], ids[sampled] = flat.delta, flat.generation
    first = flat.before[flat.starts[:-1]]
    return Stitched(
        rollout=np.arange(n),
        index=np.zeros(n, np.int32),
        starts=flat.before[flat.starts],
        ids=ids,
        mask=sampled,
        source=None,
        turn_starts=(flat.before[:-1] + deltas - first[flat.rollout]).astype(np.int32),
        turn_bounds=flat.starts,
        offsets=flat.generation_starts[flat.starts],
        log_probs=flat.log_probs,
        turn_ends=flat.generation_starts[1:],
        turn_rollout=flat.rollout,
        turn_reward=flat.reward,
        turn_agent=flat.agent,
    )


def _renumbered(part: Stitched, rows: _Ints, n: int) -> Stitched:
    """``part`` with its rollouts at ``rows`` of a batch of ``n``; the others have no tokens in it."""
    lengths = np.zeros(n, np.int64)
    lengths[rows] = np.diff(part.offsets)
    part.offsets = np.concatenate(([0], np.cumsum(lengths)))
    part.rollout, part.turn_rollout = rows[part.rollout], rows[part.turn_rollout]
    return part


def _cut(flat: FlatTurns, rows: _Ints, rollout_ids: pa.Array, abandoned: Literal["keep", "drop"]) -> Stitched:
    """Rollouts with breaks, branches or retries, one at a time, on views of the batch."""
    found: list[tuple[int, int, tokens.TokenSequence, Array]] = []
    kept_turns: list[int] = []
    lengths = np.zeros(len(flat.starts) - 1, np.int64)
    generated, left_out = 0, 0
    for row in rows.tolist():
        begin, end = int(flat.starts[row]), int(flat.starts[row + 1])
        sequences = _sequences(flat.views(begin, end), rollout_ids, row, abandoned)
        trained = sorted({t for s in sequences for t, mine in zip(s.turns, s.trained, strict=True) if mine})
        left_out += end - begin - len(trained)
        place = {}
        for turn in trained:
            size = int(flat.generation_starts[begin + turn + 1] - flat.generation_starts[begin + turn])
            place[turn] = np.arange(generated, generated + size)
            generated += size
            lengths[row] += size
        kept_turns += [begin + turn for turn in trained]
        for number, s in enumerate(sequences):
            parts = [place[t] for t, mine in zip(s.turns, s.trained, strict=True) if mine]
            found.append((row, number, s, np.concatenate(parts) if parts else np.empty(0, np.int64)))
    turns = np.array(kept_turns, np.int64)
    sizes = flat.generation_starts[turns + 1] - flat.generation_starts[turns]
    every = np.repeat(flat.generation_starts[turns] - np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes)
    return Stitched(
        rollout=np.array([row for row, *_ in found], np.int64),
        index=np.array([number for _, number, *_ in found], np.int32),
        starts=_bounds([len(s.input_ids) for _, _, s, _ in found]),
        ids=_joined([s.input_ids for _, _, s, _ in found], np.int32),
        mask=_joined([s.loss_mask for _, _, s, _ in found], np.int8) != 0,
        source=_joined([source for *_, source in found], np.int64),
        turn_starts=_joined([s.turn_starts for _, _, s, _ in found], np.int32),
        turn_bounds=_bounds([len(s.turn_starts) for _, _, s, _ in found]),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        log_probs=flat.log_probs[every + np.arange(len(every))],
        turn_ends=np.cumsum(sizes),
        turn_rollout=flat.rollout[turns],
        turn_reward=flat.reward[turns],
        turn_agent=flat.agent.take(pa.array(turns)),
        abandoned=left_out,
    )


def _sequences(
    turns: Sequence[dict[str, Any]], rollout_ids: pa.Array, row: int, abandoned: Literal["keep", "drop"]
) -> list[tokens.TokenSequence]:
    try:
        tokens.expand_prompts(turns)
    except DataError as error:
        raise DataError(f"rollout {rollout_ids[row].as_py()}: {error.message}", hint=error.hint) from error
    return tokens.sequences(turns, abandoned=abandoned)


def _bounds(lengths: Sequence[int]) -> _Ints:
    return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int64)


def _joined(arrays: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)
