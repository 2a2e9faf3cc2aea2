"""What no consumer of token data may take: ids outside the vocabulary (T206), log-probabilities that are missing (L301), not
finite (L302) or positive (L303).

Invariants: whoever wrote the data, it is looked at before it is used; the first fault is named with its code, file,
rollout and turn; no Python loop over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gymdata.errors import RefusedError
from gymdata.rollouts.chains import FlatTurns
from gymdata.rollouts.checks import INT32_MAX, POSITIVE_TOLERANCE, odd_log_probs, outside
from gymdata.rollouts.turn_columns import Ints

_HINT = (
    "`gymdata validate` lists every such place, and `gymdata validate --fix drop -o OUT` leaves those rollouts out; "
    "collect again what should not be lost"
)


class Lists(NamedTuple):
    """n ragged lists: list k is ``values[starts[k]:starts[k + 1]]``. ``name``: what they are, for messages."""

    name: str
    values: np.ndarray
    starts: Ints


def refuse_unsound_turns(
    turns: pa.ListArray | FlatTurns,
    rollout_ids: pa.Array,
    where: str = "",
    vocab_size: int | None = None,
    *,
    unknown: bool = False,
) -> None:
    """``refuse_unsound`` for a batch of the rollouts column ``turns`` and its ``rollout_ids``; ``where``: its file.

    ``unknown``: turns all of whose log-probabilities are NaN pass; so imports mark those that their source does not have.
    """
    flat = turns if isinstance(turns, FlatTurns) else FlatTurns(turns)
    log_probs = flat.log_probs
    if unknown:
        log_probs = _without_unknown(log_probs, flat.log_prob_starts)

    def named(turn: int) -> str:
        rollout = int(flat.rollout[turn])
        return f"rollout {rollout_ids[rollout].as_py()}, turn {turn - int(flat.starts[rollout])}"

    refuse_unsound(
        (
            Lists("the prompt", flat.delta, flat.delta_starts),
            Lists("the generation", flat.generation, flat.generation_starts),
        ),
        Lists("generated token", log_probs, flat.log_prob_starts),
        flat.generation_starts,
        named,
        where,
        vocab_size,
    )


def refuse_unsound_rows(batch: pa.RecordBatch, where: str = "", vocab_size: int | None = None) -> None:
    """The same for whole rows of the rollouts or the pairs table, unknown log-probabilities (NaN in a whole list) apart."""
    if "turns" in batch.schema.names:
        refuse_unsound_turns(batch.column("turns"), batch.column("rollout_id"), where, vocab_size, unknown=True)
        return
    prompt = _lists("prompt_ids", batch.column("prompt_ids"))
    for side in ("chosen", "rejected"):
        ids, values = (_lists(f"{side}_{what}", batch.column(f"{side}_{what}")) for what in ("ids", "logprobs"))
        known = values._replace(values=_without_unknown(values.values, values.starts))

        def named(row: int) -> str:
            return f"pair {batch.column('pair_id')[row].as_py()}"

        refuse_unsound((prompt, ids), known, ids.starts, named, where, vocab_size)


def _lists(name: str, column: pa.ListArray) -> Lists:
    """A null list is an empty one."""
    column = column.fill_null([]) if column.null_count else column
    starts = column.offsets.to_numpy().astype(np.int64)
    return Lists(name, column.flatten().to_numpy(zero_copy_only=False), starts - starts[0])


def _without_unknown(values: np.ndarray, starts: Ints) -> np.ndarray:
    """``values`` with 0 in the lists that hold nothing but NaN."""
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    sizes = np.diff(starts)
    running = np.concatenate(([0], np.cumsum(unknown)))
    whole = running[starts[1:]] - running[starts[:-1]] == sizes
    return np.where(np.repeat(whole, sizes), 0.0, values)


def refuse_unsound(
    ids: Sequence[Lists],
    log_probs: Lists,
    expected_starts: Ints,
    named: Callable[[int], str],
    where: str = "",
    vocab_size: int | None = None,
) -> None:
    """Raises RefusedError (T206, L301, L302, L303) for the first fault of each kind, in this order.

    ``ids`` must be from 0 to ``vocab_size`` − 1 (None: any int32); ``log_probs`` has as many values in each list as
    ``expected_starts`` says, all of them finite and at most 0 (``POSITIVE_TOLERANCE`` is for rounding). ``named(k)``: what
    to call list k.
    """
    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for part in ids:
        places = outside(part.values, limit)
        if len(places):
            k, position = _place(part.starts, int(places[0]))
            _refuse("T206", where, named(k), f"token id {part.values[places[0]]} at position {position} of {part.name}, "
                    f"expected 0 to {limit - 1}", len(places))  # fmt: skip
    given, expected = np.diff(log_probs.starts), np.diff(expected_starts)
    uneven = np.flatnonzero(given != expected)
    if len(uneven):
        k = int(uneven[0])
        _refuse("L301", where, named(k), f"{given[k]:,} log-probabilities for {expected[k]:,} tokens, expected one for each "
                f"{log_probs.name}", len(uneven))  # fmt: skip
    odd = odd_log_probs(log_probs.values)
    if odd:
        at, code = odd[0]
        k, position = _place(log_probs.starts, at)
        wanted = "a finite number" if code == "L302" else f"at most 0 (rounding: {POSITIVE_TOLERANCE:g})"
        _refuse(code, where, named(k), f"a log-probability of {log_probs.values[at]} at position {position}, expected "
                f"{wanted}", sum(other == code for _, other in odd))  # fmt: skip


def _place(starts: Ints, at: int) -> tuple[int, int]:
    """(list, position in it) of a place in the values; lists may be empty."""
    k = int(np.searchsorted(starts, at, side="right")) - 1
    return k, at - int(starts[k])


def _refuse(code: str, where: str, name: str, what: str, n: int) -> None:
    more = f" ({n:,} such places in this part of the data)" if n > 1 else ""
    raise RefusedError(f"{where}{': ' if where else ''}{name}: {what}{more}", code=code, hint=_HINT)
