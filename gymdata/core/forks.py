"""Pairs that begin where their two rollouts part.

What always holds: prompt ++ chosen and prompt ++ rejected are what they were; both sides keep at least one generated
token, and only what both share moves to the prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_Ints = npt.NDArray[np.int64]


def at_fork(table: pa.Table) -> pa.Table:
    """The pairs table with each prompt_ids ending at the fork; messages stay as they are."""
    names = (
        "prompt_ids",
        *(f"{side}_{part}" for side in ("chosen", "rejected") for part in ("ids", "mask", "logprobs")),
    )
    lists = {name: table[name].combine_chunks() for name in names}
    compared = [lists[name] for name in ("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")]
    shared = np.array(
        [_shared(*(column[row].values.to_numpy() for column in compared)) for row in range(table.num_rows)], np.int64
    )
    offsets = {name: column.offsets.to_numpy().astype(np.int64) for name, column in lists.items()}
    chosen = offsets["chosen_ids"]
    prompt = _joined(lists["prompt_ids"], lists["chosen_ids"], chosen[:-1], chosen[:-1] + shared)
    for name in names:
        column = prompt if name == "prompt_ids" else _rest(lists[name], offsets[name][:-1] + shared, offsets[name][1:])
        table = table.set_column(table.column_names.index(name), table.schema.field(name), column)
    return table


def _shared(chosen: _Ints, chosen_mask: _Ints, rejected: _Ints, rejected_mask: _Ints) -> int:
    """How many ids both sides begin with, such that each keeps a generated token."""
    n = min(len(chosen), len(rejected))
    differs = np.flatnonzero(chosen[:n] != rejected[:n])
    last = [int(np.flatnonzero(mask)[-1]) if mask.any() else 0 for mask in (chosen_mask, rejected_mask)]
    return min(int(differs[0]) if len(differs) else n, *last)


def _rest(lists: pa.ListArray, begin: _Ints, end: _Ints) -> pa.ListArray:
    """Lists of the values between two places in the child."""
    lengths = end - begin
    ends = np.concatenate(([0], np.cumsum(lengths)))
    where = np.arange(ends[-1]) + np.repeat(begin - ends[:-1], lengths)
    return pa.ListArray.from_arrays(ends.astype(np.int32), lists.values.take(pa.array(where)))


def _joined(lists: pa.ListArray, more: pa.ListArray, begin: _Ints, end: _Ints) -> pa.ListArray:
    """Each list followed by the values of ``more`` between two places."""
    head = lists.offsets.to_numpy().astype(np.int64)
    both = [(lists.values, head[:-1], head[1:]), (more.values, begin, end)]
    parts = [v.slice(int(a[row]), int(b[row] - a[row])) for row in range(len(lists)) for v, a, b in both]
    lengths = np.diff(head) + end - begin
    values = pa.concat_arrays(parts) if parts else lists.values.slice(0, 0)
    return pa.ListArray.from_arrays(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), values)
