"""What no consumer of token data may take, whatever its source.

Invariants: no Python loop over tokens; ids outside the vocabulary (T206) and log-probabilities that are missing (L301), not
finite (L302) or positive (L303) are refused wherever token data is used; the first fault is named with its code, file,
rollout and turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from gymdata.errors import RefusedError, option, with_options
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.ragged import Ints, Ragged
from gymdata.rollouts.turn_columns import TurnColumns

if TYPE_CHECKING:
    import pyarrow as pa

Bools = npt.NDArray[np.bool_]
INT32_MAX = 2**31 - 1
_HINT = (
    "`gymdata validate` lists every such place, and {fix:drop} leaves those rollouts out; "
    "collect again what should not be lost"
)


def outside(ids: np.ndarray, limit: int) -> Ints:
    """Where ``ids`` are negative or not below ``limit``; one pass when all is well."""
    # With a null the ids are floats, and NaN is out of range; as unsigned numbers, negative ids exceed every limit.
    if not len(ids) or (ids.dtype == np.int32 and ids.view(np.uint32).max() < limit):
        return np.empty(0, np.int64)
    return np.flatnonzero(~((ids >= 0) & (ids < limit)))


def odd_log_probs(values: np.ndarray) -> dict[str, Ints]:
    """Where log-probabilities are not finite (L302), or positive (L303); two passes when all is well."""
    # The minimum is NaN when any is, and -inf when any is; the maximum shows the rest.
    if not len(values) or (np.isfinite(values.min()) and values.max() <= POSITIVE_TOLERANCE):
        return {}
    finite = np.isfinite(values)
    return {"L302": np.flatnonzero(~finite), "L303": np.flatnonzero(finite & (values > POSITIVE_TOLERANCE))}


def without_ratio(logprobs: Ragged, n_tokens: Ints, rendered: Bools | None = None) -> Iterator[tuple[str, Bools]]:
    """What has no ratio to its sampler: each code with (n,) the lists that it holds of.

    Ids rendered from text have no sampler (T213; ``rendered`` is None where all were sampled); each of ``n_tokens`` sampled
    tokens needs one log-probability (L301) that is finite (L302) and at most 0 (L303)."""
    none = np.zeros(len(logprobs), np.bool_)
    yield "T213", none if rendered is None else rendered
    yield "L301", logprobs.lengths != n_tokens
    for code, indices in odd_log_probs(logprobs.values).items():
        lacking = none.copy()
        lacking[np.searchsorted(logprobs.offsets, indices, side="right") - 1] = True
        yield code, lacking


class Lists(NamedTuple):
    """``name``: what the lists are, for messages."""

    name: str
    lists: Ragged


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

    def refuse(code: str, k: int, fault: str, n: int) -> NoReturn:
        more = f" ({n:,} such places in this part of the data)" if n > 1 else ""
        raise RefusedError(f"{_in(where)}{named(k)}: {fault}{more}", code=code, hint=with_options(_HINT))

    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for name, lists in ids:
        if len(bad := outside(lists.values, limit)):
            k, position = lists.locate(bad[0])
            fault = f"token id {lists.values[bad[0]]} at position {position} of {name}, expected 0 to {limit - 1}"
            refuse("T206", k, fault, len(bad))
    lists = log_probs.lists
    lengths, expected = lists.lengths, ids[-1].lists.lengths
    if len(bad := np.flatnonzero(lengths != expected)):
        k = int(bad[0])
        counts = f"{lengths[k]:,} log-probabilities for {expected[k]:,} tokens"
        refuse("L301", k, f"{counts}, expected one for each {log_probs.name}", len(bad))
    for code, bad in odd_log_probs(lists.values).items():
        if len(bad):
            k, position = lists.locate(bad[0])
            allowed = "a finite number" if code == "L302" else f"at most 0 (rounding: {POSITIVE_TOLERANCE:g})"
            fault = f"a log-probability of {lists.values[bad[0]]} at position {position}, expected {allowed}"
            refuse(code, k, fault, len(bad))


def refuse_unsound_turns(
    turns: TurnColumns,
    rollout_ids: pa.Array,
    where: str = "",
    vocab_size: int | None = None,
    *,
    rendered: bool = False,
    unknown: bool = False,
) -> None:
    """``refuse_unsound`` for the turns of rollouts; ``where``: their file.

    ``rendered``: turns whose ids were rendered from text pass, without log-probabilities; else they are refused (T213).
    ``unknown``: turns all of whose log-probabilities are NaN pass; imports mark missing log-probabilities so.
    """
    if turns.rendered is not None and not rendered:
        first = turns.name_of(int(turns.rendered.argmax()), rollout_ids)
        raise rendered_ids(where, first, f"{turns.rendered.sum():,} turns")
    logprobs = unless_rendered(turns.logprobs, turns.rendered)
    refuse_unsound(
        (Lists("the prompt", turns.delta), Lists("the generation", turns.generation)),
        Lists("generated token", _unless_unknown(logprobs) if unknown else logprobs),
        lambda turn: turns.name_of(turn, rollout_ids),
        where,
        vocab_size,
    )


def refuse_unsound_rows(batch: pa.RecordBatch, where: str = "", vocab_size: int | None = None) -> None:
    """The same for whole rows of the rollouts or the pairs table, but with unknown log-probabilities (NaN in a whole
    list) allowed."""
    if "turns" in batch.schema.names:
        turns = TurnColumns.of(batch.column("turns"))
        refuse_unsound_turns(turns, batch.column("rollout_id"), where, vocab_size, rendered=True, unknown=True)
        return
    prompt = Lists("prompt_ids", Ragged.of(batch.column("prompt_ids")))
    for side in ("chosen", "rejected"):
        ids, logprobs = (Ragged.of(batch.column(f"{side}_{name}")) for name in ("ids", "logprobs"))
        sampled = Lists(f"{side}_logprobs", _unless_unknown(unless_rendered(logprobs, is_rendered(batch))))
        refuse_unsound(
            (prompt, Lists(f"{side}_ids", ids)),
            sampled,
            lambda k: f"pair {batch.column('pair_id')[k]}",
            where,
            vocab_size,
        )


def rendered_ids(where: str, name: str, many: str) -> RefusedError:
    """T213, raised where rendered ids were not allowed: ``name`` has some, ``many`` in all."""
    return RefusedError(
        f"{_in(where)}{name}: ids rendered from text, not sampled ({many} in this part)",
        code="T213",
        hint=f"`pairs`, train-sft, -dpo, -kto and -reward take them with {option('allow_rendered', True)}; `experience` and "
        "train-rl take sampled ids only",
    )


def unless_rendered(logprobs: Ragged, rendered: Bools | None) -> Ragged:
    """``logprobs``, 0 for NaN in the lists whose ids were ``rendered`` (None: none were): those have no log-probability."""
    if rendered is None or not rendered.any():
        return logprobs
    return logprobs.like(np.where(logprobs.spread(rendered) & np.isnan(logprobs.values), 0.0, logprobs.values))


def _unless_unknown(logprobs: Ragged) -> Ragged:
    """``logprobs``, 0 in the lists that hold nothing but NaN."""
    # The minimum is NaN when any is.
    if not len(logprobs.values) or not np.isnan(logprobs.values.min()):
        return logprobs
    return unless_rendered(logprobs, logprobs.sums(np.isnan(logprobs.values)) == logprobs.lengths)


def is_rendered(pairs: pa.RecordBatch | pa.Table) -> Bools:
    """(n,) the pairs with ids rendered from text."""
    if "rendered" not in pairs.schema.names:
        return np.zeros(pairs.num_rows, np.bool_)
    return np.asarray(pairs.column("rendered").fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _in(where: str) -> str:
    return f"{where}: " if where else ""
