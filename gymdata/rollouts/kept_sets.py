"""Heads that are all that could be sampled: with top_p, top_k or min_p the sampler's distribution is the policy's over the
ids that these keep, and where the saved head is that set, ratios to it are those of the policy normalized over it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gymdata.errors import counted
from gymdata.rollouts.ragged import Array, Ragged, list_parts
from gymdata.rollouts.sequences import Bools, heads_of

#: A head lacks at most this much of its position's probability, or something that could be sampled is not in it.
MISSING_MASS = 1e-3


def is_kept_set(ids: Ragged, logprobs: Ragged, sampled: Array) -> Bools:
    """Which heads are kept sets, bool (n,): their probabilities sum to 1, within 1e-3, and the sampled id (int, (n,)) is one
    of theirs."""
    owner = ids.owner
    mass = np.bincount(owner, weights=np.exp(logprobs.values.astype(np.float64)), minlength=len(ids))
    has_own = np.zeros(len(ids), np.bool_)
    has_own[owner[ids.values == ids.spread(sampled)]] = True
    return (np.abs(mass - 1) <= MISSING_MASS) & has_own


class KeptSets:
    """Whether all heads of rollouts that come in parts are kept sets."""

    def __init__(self) -> None:
        self.tokens = self.headed = self.others = 0

    def add(self, turns: pa.ListArray) -> None:
        """The sampled tokens of a batch's column ``turns``; ids that were rendered from text are not looked at. Raises
        DataError as ``heads_of``."""
        _, struct = list_parts(turns)
        numbers = np.flatnonzero(~struct.field("rendered").fill_null(False).to_numpy(zero_copy_only=False))
        generation = Ragged.of(struct.field("generation_token_ids")).take(numbers)
        ids, logprobs = heads_of(turns, numbers, generation.lengths)
        self.count(ids, logprobs, generation.values)

    def count(self, ids: Ragged, logprobs: Ragged, sampled: Array) -> None:
        """Further heads, as ``is_kept_set`` has them."""
        self.tokens += len(ids)
        self.headed += int((ids.lengths > 0).sum())
        self.others += int((~is_kept_set(ids, logprobs, sampled)).sum())

    @property
    def all_kept(self) -> bool:
        return self.headed > 0 and not self.others

    def fault(self) -> str:
        """Why the heads are not kept sets, or nothing where they are, or there are none."""
        if not self.headed or not self.others:
            return ""
        return (
            f"the saved heads of {self.others:,} of {counted(self.tokens, 'token')} are not all that could be sampled"
        )
