"""Whole prompts for a column of turns, in flat buffers.

Invariants: the prompts are those of ``tokens.expand_prompts``, and content that does not match its digest is
refused. The loop is over turns, never over tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.errors import DataError
from gymdata.rollouts.turns import turn_digest

_Ints = npt.NDArray[np.int64]
#: Offsets of an Arrow list are int32, so one chunk of prompts stays below this many tokens.
CHUNK_TOKENS = 1 << 30


def with_prompts(
    turns: pa.ChunkedArray, rollout_ids: pa.ChunkedArray, *, check_digests: bool = True
) -> pa.ChunkedArray:
    """The turns column with ``prompt_token_ids`` (list<int32>) as a last field of each turn.

    ``turns`` has the schema's type. Raises DataError naming the rollout and the turn when a delta cannot be expanded
    (T210) or a digest does not match (T209).
    """
    kind = prompted(turns.type)
    chunks = []
    start = 0
    for chunk in turns.chunks:
        ids = rollout_ids.slice(start, len(chunk))
        start += len(chunk)
        for first, end in _pieces(chunk):
            chunks.append(_expand(chunk.slice(first, end - first), ids.slice(first, end - first), kind, check_digests))
    return pa.chunked_array(chunks, kind)


def prompted(kind: pa.ListType) -> pa.ListType:
    """The type of a turns column with prompts."""
    fields = [*kind.value_type, pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False)]
    return pa.list_(pa.struct(fields))


def _pieces(chunk: pa.ListArray) -> list[tuple[int, int]]:
    """Row ranges whose prompts fit one chunk."""
    offsets, flat = _ragged(chunk)
    delta, _ = _ragged(flat.field("prompt_delta_ids"))
    lengths = flat.field("prefix_length").to_numpy().astype(np.int64) + np.diff(delta)
    before = np.concatenate(([0], np.cumsum(lengths)))[offsets]
    pieces, first = [], 0
    while first < len(chunk):
        end = int(np.searchsorted(before, before[first] + CHUNK_TOKENS, side="right")) - 1
        end = min(max(end, first + 1), len(chunk))
        pieces.append((first, end))
        first = end
    return pieces


def _expand(chunk: pa.ListArray, ids: pa.ChunkedArray, kind: pa.ListType, check_digests: bool) -> pa.ListArray:
    offsets, flat = _ragged(chunk)
    parts = {name: _ragged(flat.field(name)) for name in ("prompt_delta_ids", "generation_token_ids")}
    (delta_at, delta), (gen_at, gen) = parts.values()
    parent = flat.field("parent").to_numpy().astype(np.int64)
    prefix = flat.field("prefix_length").to_numpy().astype(np.int64)
    first = np.repeat(offsets[:-1], np.diff(offsets))
    above = np.where(parent >= 0, parent + first, -1)
    lengths = prefix + np.diff(delta_at)
    _check_shape(parent, prefix, above, lengths + np.diff(gen_at), first, ids, offsets)
    if check_digests:
        lp_at, lp = _ragged(flat.field("generation_log_probs"))
        digests = flat.field("digest").to_numpy()
        bad = _first_bad_digest((delta_at, delta.to_numpy()), (gen_at, gen.to_numpy()), (lp_at, lp.to_numpy()),
                                above, prefix, digests)  # fmt: skip
        if bad is not None:
            raise _fault("T209", "its content does not match its digest", bad, offsets, ids)
    prompt_at = np.concatenate(([0], np.cumsum(lengths)))
    prompts = _fill(above, prefix, lengths, prompt_at, (delta_at, delta.to_numpy()), (gen_at, gen.to_numpy()))
    column = pa.ListArray.from_arrays(pa.array(prompt_at, pa.int32()), pa.array(prompts))
    struct = pa.StructArray.from_arrays([*flat.flatten(), column], fields=list(kind.value_type))
    mask = chunk.is_null() if chunk.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), struct, type=kind, mask=mask)


def _fill(
    above: _Ints, prefix: _Ints, lengths: _Ints, prompt_at: _Ints, delta: tuple[_Ints, Any], gen: tuple[_Ints, Any]
) -> npt.NDArray[np.int32]:
    """All prompts one after the other. A parent stands before its children, so its prompt is there to copy from."""
    out = np.empty(int(prompt_at[-1]), np.int32)
    delta_at, delta_ids = delta[0].tolist(), delta[1]
    gen_at, gen_ids = gen[0].tolist(), gen[1]
    at, size = prompt_at.tolist(), lengths.tolist()
    for k, (parent, shared) in enumerate(zip(above.tolist(), prefix.tolist(), strict=True)):
        start = at[k]
        if shared:
            whole = size[parent]
            kept = min(shared, whole)
            out[start : start + kept] = out[at[parent] : at[parent] + kept]
            if shared > whole:
                begin = gen_at[parent]
                out[start + whole : start + shared] = gen_ids[begin : begin + shared - whole]
        out[start + shared : at[k + 1]] = delta_ids[delta_at[k] : delta_at[k + 1]]
    return out


def _check_shape(
    parent: _Ints, prefix: _Ints, above: _Ints, wholes: _Ints, first: _Ints, ids: pa.ChunkedArray, offsets: _Ints
) -> None:
    own = np.arange(len(parent)) - first
    odd = np.flatnonzero((parent < -1) | (parent >= own))
    if len(odd):
        raise _fault("T210", f"got parent {parent[odd[0]]}, expected an earlier turn or -1", int(odd[0]), offsets, ids)
    limit = np.where(above >= 0, wholes[above], 0) if len(above) else above
    odd = np.flatnonzero((prefix < 0) | (prefix > limit))
    if len(odd):
        why = f"got prefix_length {prefix[odd[0]]}, expected 0 to {limit[odd[0]]}"
        raise _fault("T210", why, int(odd[0]), offsets, ids)


def _first_bad_digest(
    delta: tuple[_Ints, Any],
    gen: tuple[_Ints, Any],
    log_probs: tuple[_Ints, Any],
    above: _Ints,
    prefix: _Ints,
    digests: npt.NDArray[np.int64],
) -> int | None:
    (delta_at, ids), (gen_at, sampled), (lp_at, lps) = ((at.tolist(), values) for at, values in (delta, gen, log_probs))
    known = digests.tolist()
    for k, (parent, shared) in enumerate(zip(above.tolist(), prefix.tolist(), strict=True)):
        digest = turn_digest(
            known[parent] if parent >= 0 else 0,
            shared,
            ids[delta_at[k] : delta_at[k + 1]],
            sampled[gen_at[k] : gen_at[k + 1]],
            lps[lp_at[k] : lp_at[k + 1]],
        )
        if digest != known[k]:
            return k
    return None


def _fault(code: str, what: str, turn: int, offsets: _Ints, ids: pa.ChunkedArray) -> DataError:
    row = int(np.searchsorted(offsets, turn, side="right")) - 1
    return DataError.altered(code, f"rollout {ids[row].as_py()}, turn {turn - int(offsets[row])}", what)


def _ragged(lists: pa.ListArray) -> tuple[_Ints, Any]:
    """Offsets from 0 and the flat values that they cut; a null list is an empty one."""
    if lists.null_count:
        lists = lists.fill_null([])
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return offsets - offsets[0], values
