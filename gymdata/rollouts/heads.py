"""The sampler's heads: the ids that were most likely at the place of each sampled token, with their log-probs."""

from __future__ import annotations

import numpy as np

from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.ragged import Array, Ragged
from gymdata.rollouts.sequences import Bools

#: What rounding leaves of a sum of probabilities above 1.
_ROUNDED_SUM = 1e-3
#: Two writings of one log-prob are apart by no more than this, and this share of it: bfloat16 has 8 bits.
_ROUNDED, _ROUNDED_SHARE = 0.01, 0.01


def head_fault(ids: Ragged, logprobs: Ragged) -> tuple[int, str | None, str] | None:
    """The first head that no distribution has: its number, a code and what is wrong with it; None if there is none.
    ``ids`` (int) and ``logprobs`` (float): a list for each token, empty where nothing was saved."""
    if len(unequal := np.flatnonzero(ids.lengths != logprobs.lengths)):
        return int(unequal[0]), "L301", "top_ids and top_log_probs differ in number"
    values, owner = logprobs.values.astype(np.float64), logprobs.owner
    order = np.lexsort((ids.values, ids.owner))
    twice = (np.diff(ids.values[order]) == 0) & (np.diff(ids.owner[order]) == 0)
    too_much = np.bincount(owner, weights=np.exp(np.minimum(values, 1)), minlength=len(logprobs)) > 1 + _ROUNDED_SUM
    for tokens, code, what in (
        (owner[~np.isfinite(values)], "L302", "a log-probability of top_log_probs is not finite"),
        (owner[values > POSITIVE_TOLERANCE], "L303", "a log-probability of top_log_probs is above 0"),
        (owner[ids.values < 0], "T206", "an id of top_ids is negative"),
        (ids.owner[order][1:][twice], None, "an id is twice in top_ids"),
        (np.flatnonzero(too_much), None, "the probabilities of top_log_probs sum to more than 1"),
    ):
        if len(tokens):
            return int(tokens.min()), code, what
    return None


def of_another_token(ids: Ragged, logprobs: Ragged, sampled: Array, saved: Array) -> Bools:
    """Which heads, bool (n,), are not those of the sampled ids, int (n,), with their saved log-probs, float (n,): they have
    another number for that id, or lack it though it was likelier than what they have. None is where ``saved`` is NaN."""
    owner, values, saved = ids.owner, logprobs.values.astype(np.float64), saved.astype(np.float64)
    rounding = _ROUNDED + _ROUNDED_SHARE * np.abs(saved)
    own = np.flatnonzero(ids.values == sampled[owner])
    in_head, least = np.full(len(ids), np.nan), np.full(len(ids), np.inf)
    in_head[owner[own]] = values[own]
    np.minimum.at(least, owner, values)
    wrong = (np.abs(in_head - saved) > rounding) | (np.isnan(in_head) & (saved > least + rounding))
    return np.asarray(wrong, np.bool_)
