"""Saved log-probabilities against recomputed ones: how far apart, where, and which turns are not what they claim.

Δ is saved − recomputed, in nats, of one token at the temperature of its row; the ratio is exp(−Δ), as in batch RL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata import credit
from gymdata.checks.violations import Violation
from gymdata.rollouts.logprobs import Ratios, Rounding, more_than

Array = npt.NDArray[Any]

#: Of a turn's tokens this many times the share may be far apart that rounding leaves of all: turns differ in how certain
#: their tokens are.
_OF_A_TURN = 4
#: A token this many times ``rounding.token`` apart was not rounded so far.
_NO_ROUNDING = 10
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
#: From this position on, lines of the table cover ranges.
_SINGLE = 4
_MOST_TURNS = 16


@dataclass(frozen=True)
class LogprobComparison:
    """Sampled tokens of n rollouts in turn order: rollout r has ``offsets[r]:offsets[r + 1]`` of ``saved`` and
    ``recomputed`` (float32); turn t ends before ``turn_ends[t]``, belongs to rollout ``turn_rollout[t]`` and is its
    ``turn_number[t]``-th. ``rows``: the rollouts' places in their input. ``kept_mass``: where ``recomputed`` is normalized
    over kept sets, the logarithm of the probability that the model gives to each token's."""

    rollout_ids: Sequence[str]
    rows: Array
    offsets: Array
    saved: Array
    recomputed: Array
    turn_ends: Array
    turn_rollout: Array
    turn_number: Array
    kept_mass: Array | None = None

    @classmethod
    def joined(cls, parts: Sequence[LogprobComparison]) -> LogprobComparison:
        """Several batches as one."""
        if len(parts) == 1:
            return parts[0]
        tokens = np.cumsum([0, *(len(p.saved) for p in parts)])
        rollouts = np.cumsum([0, *(len(p.rollout_ids) for p in parts)])
        return cls(
            [i for p in parts for i in p.rollout_ids],
            np.concatenate([p.rows for p in parts]),
            np.concatenate([[0], *(p.offsets[1:] + t for p, t in zip(parts, tokens[:-1], strict=True))]),
            np.concatenate([p.saved for p in parts]),
            np.concatenate([p.recomputed for p in parts]),
            np.concatenate([p.turn_ends + t for p, t in zip(parts, tokens[:-1], strict=True)]),
            np.concatenate([p.turn_rollout + r for p, r in zip(parts, rollouts[:-1], strict=True)]),
            np.concatenate([p.turn_number for p in parts]),
            None if parts[0].kept_mass is None else np.concatenate([p.kept_mass for p in parts]),
        )

    @cached_property
    def apart(self) -> Array:
        """Δ of every token, float64."""
        return self.saved.astype(np.float64) - self.recomputed.astype(np.float64)

    @cached_property
    def turn_starts(self) -> Array:
        return np.concatenate(([0], self.turn_ends[:-1])).astype(np.int64)

    @cached_property
    def turn(self) -> Array:
        """The turn of every token, an index into the turn arrays."""
        return np.repeat(np.arange(len(self.turn_ends)), self.turn_ends - self.turn_starts)

    @cached_property
    def position(self) -> Array:
        """Every token's place in its turn's generation."""
        return np.arange(len(self.saved)) - self.turn_starts[self.turn]

    def where(self, token: int) -> tuple[int, int, int]:
        """(rollout, turn, position) of a token."""
        turn = int(self.turn[token])
        return int(self.turn_rollout[turn]), int(self.turn_number[turn]), int(self.position[token])


def differs(far: Array, tokens: Array, rounding: Rounding) -> Array:
    """Which turns, or sequences, are not the model's, bool: ``far`` of their ``tokens`` are more than ``rounding.token``
    apart."""
    return more_than(far, tokens, _OF_A_TURN * rounding.far)


def departures(compared: LogprobComparison, rollouts: Array, rounding: Rounding) -> list[str]:
    """What rounding does not explain in the tokens of some rollouts (bool, of all)."""
    tokens = np.repeat(rollouts, np.diff(compared.offsets))
    ratios = Ratios(rounding)
    ratios.add(compared.recomputed[tokens], compared.saved[tokens])
    return ratios.departures()


def summary(compared: LogprobComparison, rounding: Rounding) -> dict[str, Any]:
    """Figures over all tokens. The KL estimates are of sampler to model: k1 = mean Δ, k3 = mean(exp(−Δ) − 1 + Δ).
    ``departures``: which of them rounding does not explain; ``tokens_beyond_rounding``: single tokens that it
    cannot explain, of which a few decide nothing."""
    ratios = Ratios(rounding)
    ratios.add(compared.recomputed, compared.saved)
    facts = ratios.facts()
    beyond = np.abs(compared.apart) > rounding.token
    with np.errstate(over="ignore"):
        quantiles = np.exp(-np.quantile(compared.apart, [1 - q for q in QUANTILES]))
        k3 = float(credit.kl(compared.saved.astype(np.float64), compared.recomputed.astype(np.float64), "k3").mean())
    return {
        "tokens": len(beyond),
        "rollouts": len(compared.rollout_ids),
        "turns": len(compared.turn_ends),
        **{name: facts[name] for name in ("max_abs_difference", "mean_abs_difference")},
        "tokens_beyond_tolerance": int(beyond.sum()),
        "tokens_beyond_rounding": int((np.abs(compared.apart) > _NO_ROUNDING * rounding.token).sum()),
        "rollouts_beyond_tolerance": len(np.unique(compared.turn_rollout[compared.turn[beyond]])),
        "ratio": {
            **{name: facts[name] for name in ("mean", "min", "max")},
            "quantiles": {f"{q:g}": float(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
        },
        **{name: facts[name] for name in ("share_outside", "effective_sample_size")},
        "kl_k1": float(compared.apart.mean()),
        "kl_k3": k3,
        "departures": ratios.departures(),
        **_before_kept_sets(compared, rounding),
    }


def _before_kept_sets(compared: LogprobComparison, rounding: Rounding) -> dict[str, Any]:
    """Where the model is normalized over kept sets, its ratios over the whole vocabulary."""
    if compared.kept_mass is None:
        return {}
    ratios = Ratios(rounding)
    ratios.add(compared.recomputed + compared.kept_mass, compared.saved)
    names = ("mean", "share_outside", "effective_sample_size")
    return {"before_kept_sets": {name: ratios.facts()[name] for name in names}}


def by_position(compared: LogprobComparison) -> list[dict[str, Any]]:
    """How far apart tokens are, by their place in the generation: 0, 1, 2, 3, then 4–7, 8–15 and so on."""
    position = compared.position
    wide = position >= _SINGLE
    bucket = np.where(wide, _SINGLE + np.log2(np.maximum(position, _SINGLE) / _SINGLE).astype(np.int64), position)

    def name(b: int) -> str:
        low = b if b < _SINGLE else _SINGLE << (b - _SINGLE)
        return str(b) if b < _SINGLE else f"{low}–{2 * low - 1}"

    return [{"positions": name(b), **row} for b, row in _grouped(compared.apart, bucket)]


def by_turn(compared: LogprobComparison) -> list[dict[str, Any]]:
    """The same by the number of the turn; late turns share the last line."""
    number = np.minimum(compared.turn_number[compared.turn], _MOST_TURNS)
    return [{"turns": str(b) if b < _MOST_TURNS else f"{b}–", **row} for b, row in _grouped(compared.apart, number)]


def _grouped(apart: Array, bucket: Array) -> list[tuple[int, dict[str, float]]]:
    result = []
    for number in np.unique(bucket).tolist():
        deltas = apart[bucket == number]
        far = np.abs(deltas)
        facts = {"mean_abs": float(far.mean()), "max_abs": float(far.max()), "mean": float(deltas.mean())}
        result.append((int(number), {"tokens": len(deltas), **facts}))
    return result


def worst(compared: LogprobComparison, n: int) -> Array:
    """The ``n`` tokens that are furthest apart, the furthest first."""
    far = np.abs(compared.apart)
    n = min(n, len(far))
    top = np.argpartition(far, len(far) - n)[len(far) - n :] if n else np.empty(0, np.int64)
    ordered: np.ndarray = top[np.lexsort((top, -far[top]))]
    return ordered


def violations(compared: LogprobComparison, rounding: Rounding, departures: Sequence[str]) -> list[Violation]:
    """One L305 for every turn that ``differs``, at its first token beyond ``rounding.token``; one for the whole where only
    the figures over all tokens do (``departures``)."""
    far = np.abs(compared.apart)
    beyond = far > rounding.token
    sizes = compared.turn_ends - compared.turn_starts
    counts = np.bincount(compared.turn[beyond], minlength=len(sizes))
    result = []
    for turn in np.flatnonzero(differs(counts, sizes, rounding)).tolist():
        span = slice(int(compared.turn_starts[turn]), int(compared.turn_ends[turn]))
        token = span.start + int(beyond[span].argmax())
        top = int(far[span].argmax())
        rollout = int(compared.turn_rollout[turn])
        result.append(
            Violation(
                "L305",
                int(compared.rows[rollout]),
                compared.rollout_ids[rollout],
                turn=int(compared.turn_number[turn]),
                position=int(compared.position[token]),
                expected=f"{compared.recomputed[token]:.6f}",
                got=f"{compared.saved[token]:.6f}",
                detail=f"{counts[turn]} of {sizes[turn]} tokens are further than {rounding.token:g} apart, the "
                f"furthest {far[span][top]:.4g} at position {top}",
            )
        )
    if not result and departures:
        result.append(
            Violation("L305", 0, expected="what rounding leaves", got=departures[0], detail="; ".join(departures))
        )
    return result
