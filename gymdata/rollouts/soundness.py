"""What no consumer of token data may take, whatever its source.

Invariants: no Python loop over tokens; ids outside the vocabulary (T206) and log-probabilities that are missing (L301), not
finite (L302) or positive (L303) are refused wherever token data is used (``without_ratio`` has the rule); the first fault
is named with its code, file, rollout and turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from gymdata.errors import RefusedError, option, with_options
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.ragged import Ints, Ragged
from gymdata.rollouts.turn_columns import TurnColumns

if TYPE_CHECKING:
    import pyarrow as pa

INT32_MAX = 2**31 - 1


def outside(ids: np.ndarray, limit: int) -> Ints:
    """Where ``ids`` are negative or not below ``limit``; one pass when all is well."""
    # With a null the ids are floats, and NaN is out of range; as unsigned numbers, negative ids exceed every limit.
    if not len(ids) or (ids.dtype == np.int32 and ids.view(np.uint32).max() < limit):
        return np.empty(0, np.int64)
    return np.flatnonzero(~((ids >= 0) & (ids < limit)))


def odd_log_probs(lp: np.ndarray) -> list[tuple[int, str]]:
    """(place, L302 or L303) of every log-probability that is not finite, or positive; two passes when all is well."""
    # The minimum is NaN when any is, and -inf when any is; the maximum shows the rest.
    if not len(lp) or (np.isfinite(lp.min()) and lp.max() <= POSITIVE_TOLERANCE):
        return []
    finite = np.isfinite(lp)
    faults = [(int(i), "L302") for i in np.flatnonzero(~finite)]
    faults += [(int(i), "L303") for i in np.flatnonzero(finite & (lp > POSITIVE_TOLERANCE))]
    return faults


def without_ratio(
    logprobs: Ragged, n_tokens: Ints, rendered: npt.NDArray[np.bool_] | None = None
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """The one rule on what has no ratio to its sampler: each code with (n,) the lists that it holds of.

    Ids rendered from text have no sampler (T213; ``rendered`` is None where all were sampled); each of ``n_tokens`` sampled
    tokens needs one log-probability (L301) that is finite (L302) and at most 0 (L303)."""
    none = np.zeros(len(logprobs), np.bool_)
    yield "T213", none if rendered is None else rendered
    yield "L301", logprobs.lengths != n_tokens
    values = logprobs.values
    if not len(values) or (np.isfinite(values.min()) and values.max() <= POSITIVE_TOLERANCE):
        yield from (("L302", none), ("L303", none))
        return
    finite = np.isfinite(values)
    yield "L302", logprobs.sums(~finite) > 0
    yield "L303", logprobs.sums(finite & (values > POSITIVE_TOLERANCE)) > 0


_HINT = (
    "`gymdata validate` lists every such place, and {fix:drop} leaves those rollouts out; "
    "collect again what should not be lost"
)


class Lists(NamedTuple):
    """``name``: what the lists are, for messages."""

    name: str
    lists: Ragged


def refuse_unsound_turns(
    turns: pa.ListArray | TurnColumns,
    rollout_ids: pa.Array,
    where: str = "",
    vocab_size: int | None = None,
    *,
    unknown: bool = False,
    rendered: bool = False,
) -> None:
    """``refuse_unsound`` for a batch of the rollouts column ``turns`` and its ``rollout_ids``; ``where``: its file.

    ``unknown``: turns all of whose log-probabilities are NaN pass; imports mark missing log-probabilities so.
    ``rendered``: turns whose ids were rendered from text pass, without log-probabilities; else they are refused (T213).
    """
    flat = turns if isinstance(turns, TurnColumns) else TurnColumns.of(turns)
    _, lacking = next(without_ratio(flat.logprobs, flat.generation.lengths, flat.rendered))
    if lacking.any() and not rendered:
        raise rendered_ids(where, flat.name_of(int(lacking.argmax()), rollout_ids), f"{lacking.sum():,} turns")
    logprobs = unless_rendered(flat.logprobs, flat.rendered)
    refuse_unsound(
        (Lists("the prompt", flat.delta), Lists("the generation", flat.generation)),
        Lists("generated token", _without_unknown(logprobs) if unknown else logprobs),
        lambda turn: flat.name_of(turn, rollout_ids),
        where,
        vocab_size,
    )


def refuse_unsound_rows(batch: pa.RecordBatch, where: str = "", vocab_size: int | None = None) -> None:
    """The same for whole rows of the rollouts or the pairs table, but with unknown log-probabilities (NaN in a whole
    list) allowed."""
    if "turns" in batch.schema.names:
        ids = batch.column("rollout_id")
        refuse_unsound_turns(batch.column("turns"), ids, where, vocab_size, unknown=True, rendered=True)
        return
    prompt = Lists("prompt_ids", Ragged.of(batch.column("prompt_ids")))
    for side in ("chosen", "rejected"):
        ids, logprobs = (Ragged.of(batch.column(f"{side}_{name}")) for name in ("ids", "logprobs"))

        def named(row: int) -> str:
            return f"pair {batch.column('pair_id')[row].as_py()}"

        sampled = Lists(f"{side}_logprobs", _without_unknown(unless_rendered(logprobs, is_rendered(batch))))
        refuse_unsound((prompt, Lists(f"{side}_ids", ids)), sampled, named, where, vocab_size)


def rendered_ids(where: str, name: str, many: str) -> RefusedError:
    """T213, raised where rendered ids were not allowed: ``name`` has some, ``many`` in all."""
    return RefusedError(
        f"{where}{': ' if where else ''}{name}: ids rendered from text, not sampled ({many} in this part)",
        code="T213",
        hint=f"`pairs`, train-sft, -dpo, -kto and -reward take them with {option('allow_rendered', True)}; `experience` and "
        "train-rl take sampled ids only",
    )


def unless_rendered(logprobs: Ragged, rendered: npt.NDArray[np.bool_] | None) -> Ragged:
    """``logprobs``, 0 for NaN in the lists whose ids were ``rendered`` (None: none were): those have no log-probability."""
    if rendered is None or not rendered.any():
        return logprobs
    return logprobs.like(np.where(logprobs.spread(rendered) & np.isnan(logprobs.values), 0.0, logprobs.values))


def is_rendered(pairs: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_]:
    """(n,) the pairs with ids rendered from text."""
    if "rendered" not in pairs.schema.names:
        return np.zeros(pairs.num_rows, np.bool_)
    return np.asarray(pairs.column("rendered").fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _without_unknown(lists: Ragged) -> Ragged:
    """0 in the lists that hold nothing but NaN."""
    # The minimum is NaN when any is.
    if not len(lists.values) or not np.isnan(lists.values.min()):
        return lists
    unknown = np.isnan(lists.values)
    return lists.like(np.where(lists.spread(lists.sums(unknown) == lists.lengths), 0.0, lists.values))


def refuse_unsound(
    ids: Sequence[Lists],
    log_probs: Lists,
    named: Callable[[int], str],
    where: str = "",
    vocab_size: int | None = None,
) -> None:
    """Raises RefusedError (T206, L301, L302, L303) for the first fault of each kind, in this order.

    ``ids`` must be from 0 to ``vocab_size`` − 1 (None: any int32); ``log_probs`` has as many values in each list as
    the last of ``ids``, all of them finite and at most 0 (``POSITIVE_TOLERANCE`` is for rounding). ``named(k)``: what
    to call list k.
    """
    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for name, lists in ids:
        bad = outside(lists.values, limit)
        if len(bad):
            k, position = lists.locate(bad[0])
            fault = f"token id {lists.values[bad[0]]} at position {position} of {name}, expected 0 to {limit - 1}"
            _refuse("T206", where, named(k), fault, len(bad))
    lengths, expected = log_probs.lists.lengths, ids[-1].lists.lengths
    for code, lacking in without_ratio(log_probs.lists, expected):
        if not lacking.any():
            continue
        if code == "L301":
            k = int(lacking.argmax())
            counts = f"{lengths[k]:,} log-probabilities for {expected[k]:,} tokens"
            fault = f"{counts}, expected one for each {log_probs.name}"
            _refuse(code, where, named(k), fault, int(lacking.sum()))
        odd = odd_log_probs(log_probs.lists.values)
        index = next(place for place, other in odd if other == code)
        k, position = log_probs.lists.locate(index)
        allowed = "a finite number" if code == "L302" else f"at most 0 (rounding: {POSITIVE_TOLERANCE:g})"
        fault = f"a log-probability of {log_probs.lists.values[index]} at position {position}, expected {allowed}"
        _refuse(code, where, named(k), fault, sum(other == code for _, other in odd))


def _refuse(code: str, where: str, name: str, fault: str, n: int) -> None:
    more = f" ({n:,} such places in this part of the data)" if n > 1 else ""
    raise RefusedError(f"{where}{': ' if where else ''}{name}: {fault}{more}", code=code, hint=with_options(_HINT))
