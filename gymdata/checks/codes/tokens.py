"""Token ids: T205 to T207, T212 and T213."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.rollouts.soundness import lists_of_turns, token_faults
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
T205 no token data (error): prompt or generation ids are missing, null or empty
The turn cannot be trained on as it was sampled. When a whole file has no ids (text rollouts), this is a warning, one
per turn; when only some turns lack them it is an error. `gymdata import FILE -m MODEL` renders ids from text (T213).

T206 id out of vocabulary (error): a token id is negative or not below the vocabulary's size
`position` counts from 0 in the turn's whole prompt or in its generation; the detail says which. Without a known
vocabulary (run.json or --tokenizer) only ids outside 0 to 2³¹−1 are found.

T207 generation is not its message (error): the generated ids do not decode to the message's text
Checked with --decode and a tokenizer: that of --tokenizer, or of the model that run.json names. The message's content
must occur in the decoded generation.

T212 empty generation (info): the model call generated no token
The turn trains nothing. Usual causes: an abort, or a context that was full.

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
        for k in np.flatnonzero(no_prompt | (no_generation if e.foreign else False)):
            lacking = ("prompt", no_prompt[k]), ("generation", no_generation[k])
            parts = " and ".join(part for part, lacks in lacking if lacks)
            yield self.at_turn(e, k, "T205", detail=f"{parts} ids missing, null or empty")
        for k in np.flatnonzero(no_generation & ~no_prompt) if not e.foreign else ():
            yield self.at_turn(e, k, "T212")
        for k in np.flatnonzero(t.rendered) if t.rendered is not None else ():
            yield self.at_turn(e, k, "T213")
        ids, log_probs = lists_of_turns(t)
        for code, k, position, expected, got, name in token_faults(ids, log_probs, self.settings.vocab_size):
            more = {"position": position, "expected": expected, "got": got}
            yield self.at_turn(e, k, code, **more, detail=f"in {name}")
