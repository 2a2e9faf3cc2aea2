"""Versions of the weights that sampled a turn: T214 and T215."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
T214 weight versions do not fit (error): spans of weight versions do not cover the generation
A turn's `weight_versions` say which weights sampled which tokens: the first span starts at 0, each starts where the one
before ends, and the last ends with the generation. Where they do not, they belong to other tokens. Usual causes: a
generation that was cut after it was recorded, spans of another turn. Remove the field or collect again.

T215 several weights (warning): the weights changed while the turn was sampled
The engine got other weights in the middle of a generation, as asynchronous trainers do. Each log-probability is that of
the weights that sampled its token, so ratios hold; policy_hash and policy_version name one of them only, and `audit`
finds the tokens of the others (L305). Leave such turns out where one policy must have sampled all.
""")


@CHECKS.register("weights")
class Weights(Check):
    """Which weights sampled which tokens."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """T214 where spans of weight versions do not cover the generation, T215 where several weights sampled it."""
        t = e.turns
        if t.weights is None:
            return
        starts, ends = t.weights.start, t.weights.end
        for k in np.flatnonzero(starts.lengths > 0).tolist():
            begin, end, n = starts[k], ends[k], int(t.generation.lengths[k])
            expected = np.append(0, end[:-1])
            if end[-1] != n or (begin != expected).any() or (end < begin).any():
                got = ", ".join(f"{a}–{b}" for a, b in zip(begin.tolist(), end.tolist(), strict=True))
                yield self.at_turn(e, k, "T214", expected=f"spans that follow each other from 0 to {n}", got=got)
                continue
            first = int(starts.offsets[k])
            versions = [str(t.weights.version[index]) for index in range(first, first + len(begin))]
            if len(set(versions)) > 1:
                yield self.at_turn(e, k, "T215", position=int(begin[1]), got=", then ".join(versions))
