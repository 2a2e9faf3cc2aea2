"""What no consumer of token data may take, whatever its source.

Invariants: no Python loop over tokens; ids outside the vocabulary (T206) and log-probabilities that are missing (L301), not
finite (L302) or positive (L303) are refused wherever token data is used; the first fault is named with its code, file,
rollout and turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """``name``: what the lists are, for messages. ``before``: how many values precede each list, which positions count.
    Of log-probabilities, ``mask``: which are of generated tokens (None: all); ``rollout``: the number of each list's rollout
    (None: each list is of its own)."""

    name: str
    lists: Ragged
    before: npt.NDArray[np.integer[Any]] | None = None
    mask: npt.NDArray[np.integer[Any]] | None = None
    rollout: Ints | None = None


class TokenFault(NamedTuple):
    """What is wrong with list ``row`` of those that are called ``name``, or with one of its values (``position``)."""

    code: str
    row: int
    position: int | None
    expected: str
    got: str
    name: str


def unknown(log_probs: Lists) -> Bools:
    """Which values are NaN as all others of their rollout: its log-probabilities are not known. Where a rollout has some,
    NaN is damage."""
    lists = log_probs.lists
    is_nan = np.isnan(lists.values)
    generated = np.ones(len(is_nan), np.bool_) if log_probs.mask is None else log_probs.mask != 0
    if not is_nan.any() or len(generated) != len(is_nan):  # a mask of another length is a fault of its own
        return np.zeros(len(is_nan), np.bool_)
    rollout = lists.owner if log_probs.rollout is None else log_probs.rollout[lists.owner]
    known = np.bincount(rollout[generated & ~is_nan], minlength=int(rollout.max()) + 1)
    return np.asarray(generated & (known[rollout] == 0))


def without_unknown(log_probs: Lists) -> Lists:
    """``log_probs``, 0 where they are ``unknown``: for what needs none."""
    lists = log_probs.lists
    return log_probs._replace(lists=lists.like(np.where(unknown(log_probs), 0.0, lists.values)))


def token_faults(ids: Sequence[Lists], log_probs: Lists, vocab_size: int | None = None) -> Iterator[TokenFault]:
    """Every fault of ids and log-probabilities: T206, L301, L302, L303, in this order.

    ``ids`` must be from 0 to ``vocab_size`` − 1 (None: any int32); ``log_probs`` has as many values in each list as
    the last of ``ids``, all of them finite and at most 0 (``POSITIVE_TOLERANCE`` is for rounding). A list with unknown ones
    is one fault, without a position.
    """

    def at(code: str, lists: Lists, index: int, expected: str) -> TokenFault:
        k, position = lists.lists.locate(index)
        before = 0 if lists.before is None else int(lists.before[k])
        return TokenFault(code, k, before + position, expected, str(lists.lists.values[index]), lists.name)

    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for part in ids:
        for index in outside(part.lists.values, limit):
            yield at("T206", part, index, f"0 to {limit - 1}")
    lengths, needed = log_probs.lists.lengths, ids[-1].lists.lengths
    for k in np.flatnonzero(lengths != needed).tolist():
        yield TokenFault("L301", k, None, str(needed[k]), str(lengths[k]), log_probs.name)
    not_known = log_probs.lists.sums(unknown(log_probs))
    for k in np.flatnonzero(not_known).tolist():
        yield TokenFault("L302", k, None, "finite numbers", f"nan for all {not_known[k]}", log_probs.name)
    for code, indices in odd_log_probs(without_unknown(log_probs).lists.values).items():
        for index in indices:
            yield at(code, log_probs, index, "a finite number" if code == "L302" else "at most 0")


_SENTENCES = {
    "T206": "token id {got} at position {position} of {name}, expected {expected}",
    "L301": "{got} log-probabilities for {expected} tokens in {name}",
    "L302": "a log-probability of {got} at position {position}, expected {expected}",
    "L303": "a log-probability of {got} at position {position}, expected {expected}",
}
_UNKNOWN = "log-probabilities that are not known: {got}, expected {expected}"
_UNKNOWN_HINT = "ratios to the sampler need them; `pairs`, train-sft, -dpo, -kto and -reward do not"


def refuse_unsound(
    ids: Sequence[Lists],
    log_probs: Lists,
    named: Callable[[int], str],
    where: str = "",
    vocab_size: int | None = None,
) -> None:
    """Raises RefusedError for the first of ``token_faults``. ``named(k)``: what to call list k."""
    for fault in token_faults(ids, log_probs, vocab_size):
        is_unknown = fault.code == "L302" and fault.position is None
        text = (_UNKNOWN if is_unknown else _SENTENCES[fault.code]).format_map(fault._asdict())
        hint = _UNKNOWN_HINT if is_unknown else with_options(_HINT)
        raise RefusedError(f"{_in(where)}{named(fault.row)}: {text}", code=fault.code, hint=hint)


def lists_of_turns(turns: TurnColumns) -> tuple[tuple[Lists, Lists], Lists]:
    """The ids and log-probabilities of turns; those of rendered ids, which have none, are 0."""
    ids = Lists("the prompt", turns.delta, turns.prefix), Lists("the generation", turns.generation)
    logprobs = unless_rendered(turns.logprobs, turns.rendered)
    return ids, Lists("generation_log_probs", logprobs, rollout=turns.rollout)


def lists_of_pairs(batch: pa.RecordBatch) -> Iterator[tuple[list[Lists], Lists]]:
    """The same of both sides of a batch of the pairs table, the prompts with the first."""
    names = ["prompt_ids"]
    for side in ("chosen", "rejected"):
        ids = [Lists(name, Ragged.of(batch.column(name))) for name in (*names, f"{side}_ids")]
        logprobs, mask = (Ragged.of(batch.column(f"{side}_{name}")) for name in ("logprobs", "mask"))
        logprobs = unless_rendered(logprobs, is_rendered(batch))
        yield ids, Lists(f"{side}_logprobs", logprobs, mask=mask.values)
        names = []


def refuse_unsound_turns(
    turns: TurnColumns,
    rollout_ids: pa.Array,
    where: str = "",
    vocab_size: int | None = None,
    *,
    rendered: bool = False,
    ratios: bool = True,
) -> None:
    """``refuse_unsound`` for the turns of rollouts; ``where``: their file.

    ``rendered``: turns whose ids were rendered from text pass, without log-probabilities; else they are refused (T213).
    ``ratios``: whether log-probabilities are needed; else rollouts without any that are known pass.
    """
    if turns.rendered is not None and not rendered:
        first = turns.name_of(int(turns.rendered.argmax()), rollout_ids)
        raise rendered_ids(where, first, f"{turns.rendered.sum():,} turns")
    ids, log_probs = lists_of_turns(turns)
    log_probs = log_probs if ratios else without_unknown(log_probs)
    refuse_unsound(ids, log_probs, lambda turn: turns.name_of(turn, rollout_ids), where, vocab_size)


def refuse_unsound_rows(batch: pa.RecordBatch, where: str = "", vocab_size: int | None = None) -> None:
    """The same for whole rows of the rollouts or the pairs table, with rendered ids, and turns whose log-probabilities are
    unknown (as imports mark missing ones), allowed."""
    parts: Iterable[tuple[Sequence[Lists], Lists]]
    if "turns" in batch.schema.names:
        turns = TurnColumns.of(batch.column("turns"))
        parts, named = [lists_of_turns(turns)], lambda k: turns.name_of(k, batch.column("rollout_id"))
    else:
        parts, named = lists_of_pairs(batch), lambda k: f"pair {batch.column('pair_id')[k]}"
    for ids, log_probs in parts:
        refuse_unsound(ids, without_unknown(log_probs._replace(rollout=None)), named, where, vocab_size)


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


def is_rendered(pairs: pa.RecordBatch | pa.Table) -> Bools:
    """(n,) the pairs with ids rendered from text."""
    if "rendered" not in pairs.schema.names:
        return np.zeros(pairs.num_rows, np.bool_)
    return np.asarray(pairs.column("rendered").fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _in(where: str) -> str:
    return f"{where}: " if where else ""
