"""Log-probabilities: L301 to L306."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, CheckSettings, Violation, code_pages
from gymdata.rollouts.logprobs import SampledLogProbs
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
L301 length differs (error): log-probabilities and generated ids differ in number
One logprob per generated token is needed; an off-by-one shifts every ratio of an off-policy loss.

L302 not finite (error): a log-probability is NaN or infinite
`position` is the token's place in the generation. The literals NaN and Infinity are read, and land here. A rollout
whose log-probabilities are all NaN has none that are known (its source gave none): one finding a turn, without a position,
and a warning where no rollout of the file has any. Ratios need them: `experience` and `train-rl` refuse such rollouts, and
pairs, SFT, DPO, KTO and reward models take them.

L303 positive (error): a log-probability is above zero
Probabilities above one do not exist (1e-6 is allowed for rounding). Often probabilities or negated values were stored.

L304 biased by sampling (warning): the sampling settings make the log-probabilities biased
Raw log-probabilities at a temperature other than 1, top_p below 1, top_k, min_p, penalties and greedy decoding all
record something else than the distribution that was sampled from. One finding a file or run. Training that uses ratios
refuses such files. Collect with processed log-probabilities, top_p 1, no top_k and no penalties. With top_p, top_k and
min_p, processed log-probabilities are those of the policy over what is kept: a file whose saved heads (`--top-logprobs K`)
are all that could be sampled, at every token, has no L304, and ratios are taken over these sets.

L305 disagree with the model (error): a forward pass gives other log-probabilities
Found by `gymdata audit`: another checkpoint, temperature, template, or an off-by-one.
""")


@CHECKS.register("log_probs")
class LogProbs(Check):
    """One finite log-probability, at most 0, of each generated token: ``Tokens`` finds L301 to L303 with the ids, whole
    files have L304, and `audit` finds L305."""

    codes = _CODES


@CHECKS.register("possible_log_probs")
class PossibleLogProbs(Check):
    """L306, by file: over what was sampled at a temperature above 0. Greedy decoding may record 0 everywhere: it is L304."""

    codes = code_pages("""
L306 cannot be a sampler's (warning): the log-probabilities of a file cannot be those of a sampler
Over at least 64 sampled tokens: all are 0 or another constant, all of a turn are equal, all have at most two decimals,
some are sentinels such as -9999 (below -87.3 a float32 sampler draws nothing), or 64 and more are of rollouts of which
all are equal (each of 8 or more tokens). One finding per file. They were filled in, averaged or rounded after sampling, so
ratios to the sampler mean nothing: training that uses ratios refuses such files. Export the log-probabilities that the
engine returned, or train with SFT, DPO or KTO, which need none.
""")

    def __init__(self, settings: CheckSettings) -> None:
        super().__init__(settings)
        #: Of each file: its first row, and its log-probabilities.
        self._by_file: dict[str | None, tuple[int, SampledLogProbs]] = {}

    def find(self, e: Evidence) -> Iterable[Violation]:
        """Nothing yet; ``finish`` judges."""
        if not e.n:
            return ()
        _, counts = self._by_file.setdefault(e.file, (int(e.rows[0]), SampledLogProbs()))
        t, greedy = e.turns, np.zeros(e.n, bool)
        if e.settings:
            greedy = np.array([row.get("temperature") == 0 for row in e.settings], bool)
        elif e.temperature is not None:
            greedy = e.temperature == 0
        sampled = ~greedy[t.rollout] if t.rendered is None else ~greedy[t.rollout] & ~t.rendered
        follows = np.ones(len(t.logprobs.values), bool)
        follows[t.logprobs.offsets[:-1][t.logprobs.lengths > 0]] = False
        chosen = t.logprobs.spread(sampled)
        counts.add(t.logprobs.values[chosen], follows[chosen], t.by_rollout(t.logprobs).sums(chosen))
        return ()

    def finish(self) -> Iterator[Violation]:
        for file, (row, counts) in self._by_file.items():
            if why := counts.fault():
                yield Violation("L306", row, detail=why, file=file)
