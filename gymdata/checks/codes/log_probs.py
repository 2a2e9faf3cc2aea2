"""Log-probabilities: L301 to L305."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, Code, Violation
from gymdata.rollouts.soundness import odd_log_probs, unless_rendered
from gymdata.rollouts.turn_columns import Evidence

_CODES = (
    Code(
        "L301",
        "length differs",
        "error",
        "log-probabilities and generated ids differ in number",
        "One logprob per generated token is needed; an off-by-one shifts every ratio of an off-policy loss.",
    ),
    Code(
        "L302",
        "not finite",
        "error",
        "a log-probability is NaN or infinite",
        "`position` is the token's place in the generation. The literals NaN and Infinity are read, and land here.",
    ),
    Code(
        "L303",
        "positive",
        "error",
        "a log-probability is above zero",
        "Probabilities above one do not exist (1e-6 is allowed for rounding). Often probabilities or negated values were "
        "stored.",
    ),
    Code(
        "L304",
        "biased by sampling",
        "warning",
        "the sampling settings make the log-probabilities biased",
        "Raw log-probabilities at a temperature other than 1, top_p below 1, top_k, min_p, penalties and greedy decoding "
        "all record something else than the distribution that was sampled from. One finding a file or run. Training that "
        "uses ratios refuses such files. Collect with processed log-probabilities, top_p 1, no top_k and no penalties.",
    ),
    Code(
        "L305",
        "disagree with the model",
        "error",
        "a forward pass gives other log-probabilities",
        "Found by `gymdata audit`: another checkpoint, temperature, template, or an off-by-one.",
    ),
)


@CHECKS.register("log_probs")
class LogProbs(Check):
    """One finite log-probability, at most 0, of each generated token."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """L301, L302, L303."""
        t = e.turns
        generated, n_logprobs = t.generation.lengths, t.logprobs.lengths
        for k in np.flatnonzero(generated != n_logprobs):
            got = "none" if e.foreign and not n_logprobs[k] else str(n_logprobs[k])
            yield self.at_turn(
                e, k, "L301", expected=str(generated[k]), got=got, detail="one logprob per generated token"
            )
        for index, code in odd_log_probs(unless_rendered(t.logprobs, t.rendered).values):
            k, position = t.logprobs.locate(index)
            expected = "a finite number" if code == "L302" else "at most 0"
            yield self.at_turn(e, k, code, position=position, expected=expected, got=str(t.logprobs.values[index]))
