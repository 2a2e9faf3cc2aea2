"""Token ids: T205 to T207, T212 and T213."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.rollouts.soundness import lists_of_turns, token_faults
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
T205 no token data (error): prompt or generation ids are missing, null or empty
The turn cannot be trained on as it was sampled. When a whole file has no ids (text rollouts), this is a warning, one
per turn; when only some turns lack them it is an error, and an import rejects the row. `gymdata import FILE -m MODEL`
renders ids from text (T213).

T206 id out of vocabulary (error): a token id is negative or not below the vocabulary's size
`position` counts from 0 in the turn's whole prompt or in its generation; the detail says which. Without a known
vocabulary (run.json or --tokenizer) only ids outside 0 to 2³¹−1 are found.

T207 generation is not its message (error): the generated ids do not decode to the message's text
Checked with --decode and a tokenizer: that of --tokenizer, or of the model that run.json names. The message's content
must occur in the decoded generation.

T212 empty generation (info): the model call generated no token
The turn trains nothing. Usual causes: an abort, or a context that was full. An answer without ids at the end of another
project's rollout is one, where nothing was written in it.

T213 rendered ids (info): ids rendered from text, not sampled
`gymdata import -m` or a training made the turn's ids from its text, with a tokenizer and its chat template: the model
may have sampled other ids for the same text, and no log-probability is known (NaN). Pairs, SFT, DPO, KTO and reward
models take such rollouts with --allow-rendered; `experience` and `train-rl` take sampled ids only. Not a fault.
""")


@CHECKS.register("tokens")
class Tokens(Check):
    """Ids that are missing, beyond the vocabulary, or not sampled, and their log-probabilities."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """T205, T212, T213; T206 and L301 to L303."""
        t = e.turns
        no_prompt, no_generation = t.prefix + t.delta.lengths <= 0, t.generation.lengths == 0
        empty = _empty_ends(e, no_prompt & no_generation)
        for k in np.flatnonzero((no_prompt | (no_generation if e.foreign else False)) & ~empty):
            lacking = ("prompt", no_prompt[k]), ("generation", no_generation[k])
            parts = " and ".join(part for part, lacks in lacking if lacks)
            yield self.at_turn(e, k, "T205", detail=f"{parts} ids missing, null or empty")
        for k in np.flatnonzero(empty if e.foreign else no_generation & ~no_prompt):
            yield self.at_turn(e, k, "T212")
        for k in np.flatnonzero(t.rendered) if t.rendered is not None else ():
            yield self.at_turn(e, k, "T213")
        ids, log_probs = lists_of_turns(t)
        for code, k, position, expected, got, name in token_faults(ids, log_probs, self.settings.vocab_size):
            more = {"position": position, "expected": expected, "got": got}
            yield self.at_turn(e, k, code, **more, detail=f"in {name}")


def _empty_ends(e: Evidence, without: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(T,) of the turns ``without`` ids, those of another project in which nothing was written, after all that have ids."""
    if not e.foreign or e.messages is None or not without.any():
        return np.zeros(len(without), np.bool_)
    t, m = e.turns, e.messages
    writes = np.zeros(len(without), np.bool_)
    named = np.flatnonzero((m.turn >= 0) & (m.says | m.calls))
    rollout = np.searchsorted(m.offsets, named, side="right") - 1
    writes[t.offsets[rollout] + m.turn[named]] = True
    last, having = np.full(len(t.offsets) - 1, len(without)), np.flatnonzero(~without)
    last[t.rollout[having]] = having
    return without & ~writes & (np.arange(len(without)) > last[t.rollout])
