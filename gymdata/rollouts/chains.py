"""Rollouts to flat training columns without a Python loop over tokens: prompt, completion, mask, log-probs, messages.

Invariants: a rollout becomes one row, and only when all its turns make one chain from one first prompt; the
prompt is everything before the first generated token; the mask is 1 on generated tokens and nowhere else; log-probs are
0.0 on context; every turn's digest was checked. ``gymdata.rollouts.turns`` defines the same cut turn by turn; this is its
fast form for whole batches.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gymdata.errors import DataError
from gymdata.rollouts import turns as tokens

#: ``n_sequences`` is 1 for a usable row, 0 without token data, more when breaks or branches cut the rollout; the lists
#: of an unusable row are empty. The keys are equal exactly when the ids are (64-bit hashes).
CHAINS = pa.schema(
    [
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("completion_ids", pa.list_(pa.int32())),
        pa.field("completion_mask", pa.list_(pa.int8())),
        pa.field("completion_logprobs", pa.list_(pa.float32())),
        pa.field("n_sequences", pa.int32()),
        pa.field("prompt_key", pa.uint64()),
        pa.field("generation_key", pa.uint64()),
    ]
)
_Offsets = npt.NDArray[np.int64]


def chain_columns(turns: pa.ListArray, rollout_ids: pa.Array, agents: Collection[str] = ()) -> pa.Table:
    """One row of ``CHAINS`` a rollout, in order. ``turns`` is the rollouts column of that name (one chunk).

    ``agents``: generations of others are context (empty: nobody's are). Raises DataError (T209) naming rollout and turn
    when a digest does not match.
    """
    flat = FlatTurns(turns)
    simple = flat.is_one_chain()
    if bool(simple.all()):
        check_digests(flat, rollout_ids)
        return _stitch(flat, agents)
    fast, slow = np.flatnonzero(simple), np.flatnonzero(~simple)
    parts = [_odd_rollouts(turns.take(pa.array(slow)), rollout_ids.take(pa.array(slow)), agents)]
    if len(fast):
        parts.insert(0, chain_columns(turns.take(pa.array(fast)), rollout_ids.take(pa.array(fast)), agents))
    order = np.argsort(np.concatenate((fast, slow)), kind="stable")
    return pa.concat_tables(parts).take(pa.array(order)).combine_chunks()


class FlatTurns:
    """The turns of many rollouts as flat arrays; turn t of rollout r is at ``starts[r] + t``."""

    def __init__(self, turns: pa.ListArray) -> None:
        offsets = turns.offsets.to_numpy().astype(np.int64)
        rows = turns.flatten()
        self.starts: _Offsets = offsets - offsets[0]
        self.delta_starts, self.delta = _ragged(rows.field("prompt_delta_ids"))
        self.generation_starts, self.generation = _ragged(rows.field("generation_token_ids"))
        self.log_prob_starts, self.log_probs = _ragged(rows.field("generation_log_probs"))
        self.aligned = np.diff(self.log_prob_starts) == np.diff(self.generation_starts)
        self.parent = rows.field("parent").to_numpy(zero_copy_only=False)
        self.prefix = rows.field("prefix_length").to_numpy(zero_copy_only=False)
        self.digest = rows.field("digest").to_numpy(zero_copy_only=False)
        #: NaN where a turn has none.
        self.reward = pc.fill_null(rows.field("reward"), np.nan).to_numpy(zero_copy_only=False)
        #: Null where a turn names none.
        self.agent = rows.field("agent")
        self.lengths = np.diff(self.delta_starts) + np.diff(self.generation_starts)
        #: Tokens of all earlier turns, over all rollouts.
        self.before: _Offsets = np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)
        self.rollout = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def is_one_chain(self) -> npt.NDArray[np.bool_]:
        """Per rollout: it has turns, and each continues the one before, first prompt to last token."""
        n = len(self.starts) - 1
        turn = np.arange(len(self.parent)) - self.starts[self.rollout]
        held = self.before[:-1] - self.before[self.starts[self.rollout]]
        good = (self.parent == turn - 1) & (self.prefix == held) & self.aligned
        whole: np.ndarray = (np.bincount(self.rollout[~good], minlength=n) == 0) & (np.diff(self.starts) > 0)
        return whole

    def views(self, begin: int, end: int) -> list[dict[str, Any]]:
        """The turns from ``begin`` to ``end`` as ``gymdata.rollouts.turns`` takes them; the lists are views of the batch."""
        deltas, generations, log_probs = self.delta_starts, self.generation_starts, self.log_prob_starts
        return [
            {
                "parent": int(self.parent[t]),
                "prefix_length": int(self.prefix[t]),
                "prompt_delta_ids": self.delta[deltas[t] : deltas[t + 1]],
                "generation_token_ids": self.generation[generations[t] : generations[t + 1]],
                "generation_log_probs": self.log_probs[log_probs[t] : log_probs[t + 1]],
                "agent": self.agent[t].as_py(),
                "digest": int(self.digest[t]),
            }
            for t in range(begin, end)
        ]


def turns_of(agent: pa.Array, agents: Collection[str]) -> npt.NDArray[np.bool_]:
    """Which turns are of these agents, by the column that names a turn's."""
    found = pc.is_in(agent, value_set=pa.array(sorted(agents), pa.string()))
    return np.asarray(found.to_numpy(zero_copy_only=False))


def _ragged(lists: pa.ListArray) -> tuple[_Offsets, np.ndarray]:
    """Offsets from 0 and the values between them. A slice's own offsets do not start at 0."""
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False)


def check_digests(flat: FlatTurns, rollout_ids: pa.Array) -> None:
    """Compare every turn's ``tokens.turn_digest``, made on views of the bytes. Raises DataError (T209) naming the turn."""
    pack, digest_of, above = struct.Struct("<qi").pack, xxhash.xxh3_64_intdigest, 0
    delta, generation, log_probs = (_bytes(a) for a in (flat.delta, flat.generation, flat.log_probs))
    bounds = zip(
        (4 * flat.delta_starts[:-1]).tolist(), (4 * flat.delta_starts[1:]).tolist(),
        (4 * flat.generation_starts[:-1]).tolist(), (4 * flat.generation_starts[1:]).tolist(),
        flat.parent.tolist(), flat.prefix.tolist(), flat.digest.tolist(), strict=True,
    )  # fmt: skip
    for at, (d0, d1, g0, g1, parent, prefix, digest) in enumerate(bounds):
        got = digest_of(pack(above if parent >= 0 else 0, prefix))
        got = digest_of(log_probs[g0:g1], digest_of(generation[g0:g1], digest_of(delta[d0:d1], got)))
        if got - ((got >> 63) << 64) != digest:
            rollout = int(flat.rollout[at])
            where = f"rollout {rollout_ids[rollout].as_py()}, turn {at - int(flat.starts[rollout])}"
            raise DataError.altered("T209", where, "its content does not match its digest")
        above = digest


def _bytes(values: np.ndarray) -> memoryview:
    """The bytes of an array of four-byte numbers; an empty one has none to cast."""
    return np.ascontiguousarray(values).view(np.uint8).data if len(values) else memoryview(b"")


def _stitch(flat: FlatTurns, agents: Collection[str]) -> pa.Table:
    """All rollouts are one chain each, so delta and generation of every turn simply follow each other."""
    first, n = flat.starts[:-1], len(flat.starts) - 1
    deltas, generations = np.diff(flat.delta_starts), np.diff(flat.generation_starts)
    prompts = deltas[first]
    opens = np.zeros(len(deltas), dtype=bool)
    opens[first] = True
    of_prompt = np.repeat(opens, deltas)
    # What follows the prompt: a turn's delta (none of the first turn's) and its generation, turn by turn.
    parts = np.stack((np.where(opens, 0, deltas), generations), axis=1).ravel()
    sampled = np.repeat(np.tile(np.array([False, True]), len(deltas)), parts)
    ids, logprobs = np.empty(len(sampled), np.int32), np.zeros(len(sampled), np.float32)
    ids[~sampled], ids[sampled] = flat.delta[~of_prompt], flat.generation
    logprobs[sampled] = flat.log_probs
    trained = sampled
    if agents:
        theirs = turns_of(flat.agent, agents)
        trained = np.repeat(np.stack((np.zeros_like(theirs), theirs), axis=1).ravel(), parts)
        logprobs[~trained] = 0.0
    ends = np.concatenate(([0], np.cumsum(np.diff(flat.before[flat.starts]) - prompts))).astype(np.int32)
    columns = [
        pa.ListArray.from_arrays(np.concatenate(([0], np.cumsum(prompts))).astype(np.int32), flat.delta[of_prompt]),
        pa.ListArray.from_arrays(ends, ids),
        pa.ListArray.from_arrays(ends, trained.view(np.int8)),
        pa.ListArray.from_arrays(ends, logprobs),
        pa.array(np.ones(n, np.int32)),
        _keys(flat.delta, flat.delta_starts[first], flat.delta_starts[first] + prompts),
        _generation_keys(flat, generations),
    ]
    return pa.Table.from_arrays(columns, schema=CHAINS)


def _keys(values: np.ndarray, begin: _Offsets, end: _Offsets) -> pa.Array:
    data, digest_of = _bytes(values), xxhash.xxh3_64_intdigest
    pairs = zip((4 * begin).tolist(), (4 * end).tolist(), strict=True)
    return pa.array([digest_of(data[a:b]) for a, b in pairs], pa.uint64())


def _generation_keys(flat: FlatTurns, lengths: _Offsets) -> pa.Array:
    """``_generation_key`` of every rollout, on views of the bytes."""
    begin, end = flat.generation_starts[flat.starts[:-1]], flat.generation_starts[flat.starts[1:]]
    places = (8 * flat.starts[:-1], 8 * flat.starts[1:], 4 * begin, 4 * end)
    generation, digest_of = _bytes(flat.generation), xxhash.xxh3_64_intdigest
    sizes = np.ascontiguousarray(lengths, dtype=np.int64).view(np.uint8).data if len(lengths) else memoryview(b"")
    rows = zip(*(place.tolist() for place in places), strict=True)
    return pa.array([digest_of(generation[a:b], digest_of(sizes[s:e])) for s, e, a, b in rows], pa.uint64())


def _generation_key(generation: np.ndarray, lengths: np.ndarray) -> int:
    seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(lengths, dtype=np.int64).data)
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(generation, dtype=np.int32).data, seed)


def _odd_rollouts(turns: pa.ListArray, rollout_ids: pa.Array, agents: Collection[str]) -> pa.Table:
    """Rollouts with retries, branches, breaks or without turns: rare, so one at a time."""
    rows = [_odd_row(t.as_py(), r.as_py(), agents) for t, r in zip(turns, rollout_ids, strict=True)]
    return pa.Table.from_pylist(rows, schema=CHAINS)


def _odd_row(turns: Sequence[dict[str, Any]], rollout_id: str, agents: Collection[str]) -> dict[str, Any]:
    tokens.prompts_of({"rollout_id": rollout_id, "turns": turns})
    found = tokens.sequences(turns, abandoned="drop")
    row: dict[str, Any] = dict.fromkeys(CHAINS.names)
    empty: dict[str, Any] = {name: [] for name in CHAINS.names[:4]}
    if len(found) != 1:
        return row | empty | {"n_sequences": len(found), "prompt_key": 0, "generation_key": 0}
    one = found[0]
    cut = int(one.turn_starts[0])
    lengths = np.array([len(turns[turn]["generation_token_ids"]) for turn in one.turns])
    mask, logprobs = one.loss_mask.copy(), one.logprobs.copy()
    for turn, start, length in zip(one.turns, one.turn_starts, lengths, strict=True):
        if agents and turns[turn]["agent"] not in agents:
            mask[start : start + length], logprobs[start : start + length] = 0, 0.0
    return row | {
        "prompt_ids": one.input_ids[:cut],
        "completion_ids": one.input_ids[cut:],
        "completion_mask": mask[cut:],
        "completion_logprobs": logprobs[cut:],
        "n_sequences": 1,
        "prompt_key": xxhash.xxh3_64_intdigest(np.ascontiguousarray(one.input_ids[:cut]).data),
        "generation_key": _generation_key(one.input_ids[one.loss_mask == 1], lengths),
    }


def generated_keys(turns: pa.ListArray) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of all that each rollout generated, in turn order; 0 where nothing was."""
    flat = FlatTurns(turns)
    ends = flat.generation_starts[flat.starts].tolist()
    generation = np.ascontiguousarray(flat.generation, dtype=np.int32)
    return np.array(
        [xxhash.xxh3_64_intdigest(generation[a:b].data) if b > a else 0 for a, b in itertools.pairwise(ends)], np.uint64
    )


def trained_keys(rows: pa.Table) -> pa.Array:
    """A 64-bit hash of each completion up to its last trained token (columns of ``CHAINS``), and of which are trained."""
    ids, mask = (rows[name].combine_chunks().fill_null([]) for name in ("completion_ids", "completion_mask"))
    offsets = (ids.offsets.to_numpy() - ids.offsets[0].as_py()).tolist()
    flat, trained = ids.flatten().to_numpy(), mask.flatten().to_numpy()
    keys = []
    for begin, end in itertools.pairwise(offsets):
        found = np.flatnonzero(trained[begin:end])
        stop = begin + int(found[-1]) + 1 if len(found) else begin
        marks = xxhash.xxh3_64_intdigest(np.ascontiguousarray(trained[begin:stop]).data)
        keys.append(xxhash.xxh3_64_intdigest(np.ascontiguousarray(flat[begin:stop]).data, marks))
    return pa.array(keys, pa.uint64())


def split_messages(messages: pa.ListArray, n_turns: np.ndarray) -> tuple[pa.ListArray, pa.ListArray]:
    """Each rollout's messages before the model's first one, and from there on.

    The model's messages carry the number of their turn. Where none does (imported files), they are the last ``n_turns``
    assistant messages.
    """
    offsets = messages.offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0]
    flat = messages.flatten()
    cut = np.minimum(_first_generated(flat, offsets, np.asarray(n_turns)), offsets[1:])
    return _sublists(flat, offsets[:-1], cut), _sublists(flat, cut, offsets[1:])


def _first_generated(flat: pa.StructArray, offsets: _Offsets, n_turns: np.ndarray) -> _Offsets:
    generated = np.flatnonzero(flat.field("turn").is_valid().to_numpy(zero_copy_only=False))
    first = np.append(generated, len(flat))[np.searchsorted(generated, offsets[:-1])]
    unnumbered = np.flatnonzero(first >= offsets[1:])
    if len(unnumbered):
        said = np.flatnonzero(
            pc.fill_null(pc.equal(flat.field("role"), "assistant"), False).to_numpy(zero_copy_only=False)
        )
        low, high = np.searchsorted(said, offsets[unnumbered]), np.searchsorted(said, offsets[unnumbered + 1])
        at = np.maximum(high - np.maximum(n_turns[unnumbered], 1), low)
        first[unnumbered] = np.append(said, len(flat))[at]
    return first


def _sublists(flat: pa.Array, begin: _Offsets, end: _Offsets) -> pa.ListArray:
    """Lists of ``flat[begin[i]:end[i]]``."""
    lengths = end - begin
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    where = np.arange(ends[-1]) + np.repeat(begin - ends[:-1], lengths)
    return pa.ListArray.from_arrays(ends.astype(np.int32), flat.take(pa.array(where)))


def text_keys(generated: pa.ListArray) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the assistant's words in each list: content, reasoning and tool calls without their ids.

    0 for a list without assistant messages.
    """
    offsets = generated.offsets.to_numpy().astype(np.int64)
    flat = generated.flatten()
    is_model = pc.fill_null(pc.equal(flat.field("role"), "assistant"), False)
    words = pc.binary_join_element_wise(
        flat.field("content"), flat.field("reasoning"), _without_call_ids(flat.field("tool_calls")), "\x1f",
        null_handling="replace",
    )  # fmt: skip
    counts = np.concatenate(([0], np.cumsum(is_model.to_numpy(zero_copy_only=False)))).astype(np.int64)
    bounds = counts[offsets - offsets[0]]
    said = words.filter(is_model).to_pylist()
    pairs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return np.array(
        [xxhash.xxh3_64_intdigest("\x1e".join(said[a:b]).encode()) if b > a else 0 for a, b in pairs], np.uint64
    )


def _without_call_ids(calls: pa.Array) -> pa.Array:
    """Call ids are drawn at random, so two equal answers differ in them."""
    import json

    plain: list[str | None] = []
    for text in calls.to_pylist():
        try:
            parsed = json.loads(text) if text else None
        except ValueError:
            parsed = None
        if isinstance(parsed, list):
            text = json.dumps([{**c, "id": None} if isinstance(c, dict) else c for c in parsed], sort_keys=True)
        plain.append(text)
    return pa.array(plain, pa.string())
