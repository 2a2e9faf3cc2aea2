"""Why saved log-probabilities are not the model's: explanations are tested on sequences that disagree, and on others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.commands.audit import compare as audit
from gymdata.models.scoring import PolicyModel, ToScore
from gymdata.rollouts.logprobs import Rounding, more_than
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.sequences import RolloutSequences

Array = npt.NDArray[Any]
Cause = Literal["off_by_one", "scale", "temperature", "raw_logprobs", "template", "sampling", "checkpoint", "unknown"]

#: An explanation must leave at most this share of the mean |Δ|, or what rounding leaves and at most the second.
_LEFT, _LEFT_OF_ROUNDING = 0.2, 0.7
#: A temperature this close to that of the rows is no other one; and a Δ that is this one-sided is of a cut distribution.
_SAME_TEMPERATURE, _ONE_SIDED = 0.03, 0.8
#: A factor this close to that of a base is that one.
_SAME_BASE = 0.02
#: The search for a temperature: grids of so many from the lowest to the highest, each around the best of the one before.
_LOWEST, _HIGHEST, _POINTS, _GRIDS = 0.1, 5.0, 14, 5
#: Temperatures that people set: a fit this close to one of them is that one, if it leaves hardly more.
_USUAL = np.round(np.arange(0.1, 2.01, 0.05), 2)
_USUAL_WITHIN, _HARDLY_MORE = 0.02, 1.02
#: Difference of log-likelihood, in nats, from which on tokens show which temperature they were drawn at.
_TELLING = 3.0
_FIRST = 3


@dataclass(frozen=True, slots=True)
class Explanation:
    """A cause that would explain the saved numbers. ``before`` and ``after``: mean |Δ| of the same tokens without and
    with it.

    ``certain``: it predicts the saved numbers; otherwise it is what is left.
    """

    cause: Cause
    text: str
    before: float
    after: float | None = None
    certain: bool = True

    def as_json(self) -> dict[str, object]:
        return {
            "cause": self.cause,
            "text": self.text,
            "mean_abs_before": self.before,
            "mean_abs_after": self.after,
            "certain": self.certain,
        }


@dataclass(frozen=True, slots=True)
class Probe:
    """Scored tokens: ``saved`` and ``recomputed`` log-probs, the turn of each and its position there, the temperature
    that its row says, and the number of its turn in its rollout."""

    saved: Array
    recomputed: Array
    turn: Array
    position: Array
    temperature: Array
    number: Array

    def take(self, tokens: Array | slice) -> Probe:
        return Probe(*(getattr(self, field.name)[tokens] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Probe]) -> Probe:
        # Turns of different sequences must not look alike.
        apart = [replace(part, turn=part.turn + (number << 32)) for number, part in enumerate(parts)]
        return cls(*(np.concatenate([getattr(part, field.name) for part in apart]) for field in fields(cls)))

    @property
    def apart(self) -> float:
        return mean_apart(self.saved, self.recomputed)


def mean_apart(saved: Array, other: Array) -> float:
    """Mean |Δ| over the tokens for which ``other`` is finite."""
    finite = np.isfinite(other)
    return float(np.abs(saved[finite].astype(np.float64) - other[finite]).mean()) if finite.any() else float("inf")


def shifted(probe: Probe) -> Explanation | None:
    """Saved numbers that belong to a neighbouring token of their turn."""
    best: tuple[float, int, float] | None = None
    for by in (-2, -1, 1, 2):
        neighbours = np.arange(len(probe.saved)) + by
        within = (neighbours >= 0) & (neighbours < len(neighbours))
        within[within] = probe.turn[neighbours[within]] == probe.turn[within]
        if within.any():
            after = mean_apart(probe.saved[within], probe.recomputed[neighbours[within]])
            before = mean_apart(probe.saved[within], probe.recomputed[within])
            if best is None or after < best[0]:
                best = after, by, before
    if best is None:
        return None
    after, by, before = best
    side = "after" if by > 0 else "before"
    neighbour = "the next token" if by == 1 else f"the token {abs(by)} {side}" if abs(by) > 1 else "the token before"
    text = f"off by one: the number saved at each token is that of {neighbour}"
    return Explanation("off_by_one", text.replace("by one", "by two") if abs(by) > 1 else text, before, after)


def off_by_one(probe: Probe, by_shift: Mapping[int, Array]) -> Explanation | None:
    """Saved numbers that were gathered from the scores of another place. ``by_shift``: log-probs of each token under
    the scores ``shift`` positions later (+) or earlier."""
    scored = [(mean_apart(probe.saved, other), by) for by, other in by_shift.items() if np.isfinite(other).any()]
    if not scored:
        return None
    after, by = min(scored)
    side = "after it" if by > 0 else "two places before it"
    finite = np.isfinite(by_shift[by])
    return Explanation(
        "off_by_one",
        f"off by one: each token was scored with the model's output {side}, not the one just before it",
        probe.take(finite).apart,
        after,
    )


def scaled(probe: Probe, rounding: Rounding) -> Explanation | None:
    """Saved numbers that are a constant factor apart at all tokens, as logarithms of another base are, and those of no other
    distribution."""
    saved, recomputed = probe.saved.astype(np.float64), probe.recomputed.astype(np.float64)
    factor = float(saved @ recomputed) / (float(recomputed @ recomputed) or 1.0)
    base = next((base for base in (2, 10) if abs(factor * math.log(base) - 1) <= _SAME_BASE), None)
    factor = factor if base is None else 1 / math.log(base)
    far = np.abs(saved - factor * recomputed) > rounding.token * max(1.0, factor)
    if abs(factor - 1) <= _SAME_TEMPERATURE or more_than(far.sum(), len(far), rounding.far):
        return None
    text = f"a constant factor: the saved numbers are {factor:.4g} times the model's log-probabilities"
    if base is not None:
        text = f"logarithms of base {base}: {text}; times ln {base} they are natural logarithms"
    return Explanation("scale", text, probe.apart, mean_apart(probe.saved, factor * recomputed))


def temperature_mismatch(
    probe: Probe, log_probs_at: Callable[[Sequence[float]], Array], logprobs_mode: str | None
) -> Explanation | None:
    """Saved numbers of another temperature. ``log_probs_at``: the log-probs of all tokens at each of some temperatures, of
    shape (temperatures, tokens); the temperature that explains best is searched with it."""
    fit, after, at_fit = _fit(probe.saved, log_probs_at)
    recorded = np.unique(probe.temperature)
    if len(recorded) == 1 and abs(fit - recorded[0]) <= _SAME_TEMPERATURE * recorded[0]:
        return None
    # Which of the two did the tokens come from? The likelier one.
    likelier = float((at_fit.astype(np.float64) - probe.recomputed).sum())
    rows = ", ".join(f"{t:g}" for t in recorded[:4]) + (" …" if len(recorded) > 4 else "")
    if fit == 1.0 and (logprobs_mode == "raw_logprobs" or (logprobs_mode is None and likelier < -_TELLING)):
        why = (
            "run.json says raw_logprobs"
            if logprobs_mode == "raw_logprobs"
            else f"the tokens themselves were sampled at {rows}: that is e^{-likelier:.0f} times likelier than at 1"
        )
        text = (
            f"raw log-probabilities: the saved ones are of temperature 1, before temperature {rows} was applied; {why}"
        )
        return Explanation("raw_logprobs", text, probe.apart, after)
    text = f"another temperature: the saved log-probabilities are of {fit:.4g}, the rows say {rows}"
    if likelier > _TELLING:
        text += f"; the tokens were sampled at {fit:.4g}, too"
    elif fit == 1.0:
        text += "; raw log-probabilities would look the same"
        if likelier < -_TELLING:
            return Explanation("raw_logprobs", f"raw log-probabilities, or {text}", probe.apart, after)
    elif likelier < -_TELLING:
        text += f"; but the tokens were sampled at {rows}"
    return Explanation("temperature", text, probe.apart, after)


def _fit(saved: Array, log_probs_at: Callable[[Sequence[float]], Array]) -> tuple[float, float, Array]:
    """(temperature, mean |Δ| there, log-probs there): the best of grids that become finer, or the usual value nearby."""
    low, high = _LOWEST, _HIGHEST
    for _ in range(_GRIDS):
        grid = np.geomspace(low, high, _POINTS)
        rows = log_probs_at(grid.tolist())
        errors = [mean_apart(saved, row) for row in rows]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, _POINTS - 1)]
    fit, error, row = float(grid[best]), errors[best], rows[best]
    usual = float(_USUAL[np.abs(_USUAL - fit).argmin()])
    if abs(usual - fit) <= _USUAL_WITHIN * usual:
        row = log_probs_at([usual])[0]
        after = mean_apart(saved, row)
        if after <= _HARDLY_MORE * error or abs(usual - fit) <= _USUAL_WITHIN / 10 * usual:
            return usual, after, row
    return fit, error, row


def truncated(probe: Probe, settings: Sequence[str], tolerance: float) -> Explanation | None:
    """Saved numbers of a distribution that was cut (top_p, top_k, min_p): none is below the whole distribution's."""
    apart = probe.saved.astype(np.float64) - probe.recomputed
    one_sided = float(apart.mean()) >= _ONE_SIDED * probe.apart
    if not (one_sided or settings) or float((apart < -tolerance).mean()) > 0.005 or float(apart.mean()) <= 0:
        return None
    by = f" ({', '.join(settings)})" if settings else ", as with top_p, top_k or min_p"
    text = f"sampled from a part of the distribution{by}: saved log-probabilities are too high (L304)"
    return Explanation("sampling", text, probe.apart, None, certain=bool(settings))


def unexplained(probe: Probe, same_policy: bool | None, templates_tried: Sequence[str]) -> Explanation:
    """The explanation by exclusion, when nothing predicts the saved numbers. ``same_policy``: the model's weights are
    those that the rows name (None: not known)."""
    apart = np.abs(probe.saved.astype(np.float64) - probe.recomputed)

    def mostly(subset: Array) -> bool:
        return bool(subset.any() and (~subset).any() and apart[subset].mean() > 3 * apart[~subset].mean())

    at_start = mostly(probe.position < _FIRST)
    where = "; they differ most at the first tokens of a turn, as under another prompt" if at_start else ""
    if mostly(probe.number > 0):
        where += "; first turns differ little, so it is how the history was rendered in later ones"
    tried = f" (tried: {', '.join(templates_tried)})" if templates_tried else ""
    # One that is nearer is never named, so it is not ruled out.
    temperature = f"temperature more than {_SAME_TEMPERATURE:.0%} off"
    if same_policy:
        text = (
            "other prompt tokens: the weights are those that sampled and neither a shift nor a "
            f"{temperature} explains it, so the model read another prompt than the file has, as with a wrong "
            f"template{tried}, or the temperature was less than that off, or the numbers were changed{where}"
        )
        return Explanation("template", text, probe.apart, certain=False)
    if same_policy is None and at_start:
        text = f"a wrong template, or another checkpoint: no shift and no {temperature} explains it{where}"
        return Explanation("template", text, probe.apart, certain=False)
    weights = (
        "its weights are not those that the rows name" if same_policy is False else "the rows do not name its weights"
    )
    text = f"another checkpoint: no shift, template{tried} or {temperature} explains it, and {weights}{where}"
    return Explanation("checkpoint", text, probe.apart, certain=False)


def best_of(candidates: Sequence[Explanation | None], rounding: float) -> Explanation | None:
    """The explanation that fits best of those that fit; ``rounding``: the mean |Δ| that rounding alone leaves."""
    fit = [
        c
        for c in candidates
        if c is not None
        and c.after is not None
        and c.after < c.before
        and (c.after <= _LEFT * c.before or c.after <= min(rounding, _LEFT_OF_ROUNDING * c.before))
    ]
    return min(fit, key=lambda c: c.after / c.before if c.after else 0.0, default=None)


#: Most sequences and tokens on which explanations are tested.
_SEQUENCES, _SCORED, _TOKENS = 64, 512, 32_768
#: rollout_ids → name of a template → the prompt of each rollout's first turn under it (None: it cannot be rendered).
Renderings = Callable[[Sequence[str]], Mapping[str, Sequence[Sequence[int] | None]]]


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """Metadata of the runs. ``same_policy``: the model's weights are those that sampled (None: not known);
    ``logprobs_mode`` and ``cut_by`` (top_p and the like): of the runs, where they say so."""

    same_policy: bool | None
    logprobs_mode: str | None = None
    cut_by: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """Sequences with their scored tokens, on which explanations are tested. ``differs``: of each, whether its log-probs are
    not the model's."""

    to_score: ToScore
    rollout_ids: list[str]
    probe: Probe
    differs: list[bool]

    @classmethod
    def of(
        cls, sequences: RolloutSequences, to_score: ToScore, recomputed: np.ndarray, ids: pa.Array, rounding: Rounding
    ) -> list[ScoredSample]:
        """Some of those in ``sequences`` that differ and some that do not; ``recomputed``: the scores of ``to_score``. An
        empty list where nothing was scored."""
        sampled = sequences.sampled
        source = np.arange(to_score.n_scored) if sequences.source is None else sequences.source
        saved, scores = sampled.logprobs.values[source], to_score.scores
        far = scores.sums(np.abs(saved.astype(np.float64) - recomputed) > rounding.token)
        off = audit.differs(far, scores.lengths, rounding)
        sides = [np.flatnonzero(side & (scores.lengths > 0)) for side in (off, ~off)]
        rows = np.concatenate(
            [side[np.unique(np.linspace(0, len(side) - 1, _SEQUENCES).astype(np.int64))] for side in sides if len(side)]
            or [np.empty(0, np.int64)]
        )
        if not len(rows):
            return []
        turn = np.repeat(np.arange(len(sampled.turn_ends)), sampled.turn_sizes)[source]
        position = source - (sampled.turn_ends - sampled.turn_sizes)[turn]
        probe = Probe(saved, recomputed, turn, position, scores.spread(to_score.temperature), sampled.turn_number[turn])
        names = [ids[int(r)].as_py() for r in sequences.rollout[rows]]
        return [cls(to_score.take(rows), names, probe.take(scores.take(rows).values), off[rows].tolist())]

    @classmethod
    def subsample(cls, parts: Sequence[ScoredSample], differing: bool) -> ScoredSample | None:
        """An evenly spread sample, of the size that explanations are tested on, of all sequences or of those that differ;
        None where there are none."""
        pool = [(part, row) for part in parts for row, differs in enumerate(part.differs) if differs or not differing]
        if not pool:
            return None
        scored = sum(len(part.to_score.scores[row]) for part, row in pool) / len(pool)
        tokens = sum(int(part.to_score.lengths[row]) for part, row in pool) / len(pool)
        size = max(1, min(_SEQUENCES, int(_SCORED / scored), int(_TOKENS / tokens), len(pool)))
        chosen = [pool[index] for index in np.linspace(0, len(pool) - 1, size).astype(np.int64).tolist()]
        return cls(
            ToScore.joined([part.to_score.take(np.array([row])) for part, row in chosen]),
            [part.rollout_ids[row] for part, row in chosen],
            Probe.joined([part.probe.take(part.to_score.scores.span(row)) for part, row in chosen]),
            [part.differs[row] for part, row in chosen],
        )


def explain(
    samples: Sequence[ScoredSample],
    model: PolicyModel,
    rounding: Rounding,
    metadata: RunMetadata,
    renderings: Renderings,
    others_agree: bool,
) -> Explanation | None:
    """The cause of the differences. It must explain the sequences that look right as well, unless they are the model's
    (``others_agree``); None without any."""
    sample = ScoredSample.subsample(samples, others_agree) or ScoredSample.subsample(samples, False)
    if sample is None:
        return None
    probe, to_score = sample.probe, sample.to_score
    best = best_of(
        [
            shifted(probe),
            off_by_one(probe, {by: model.log_probs(to_score, shift=by)[0] for by in (-1, 1)}),
            scaled(probe, rounding),
            temperature_mismatch(probe, partial(model.log_probs_at, to_score), metadata.logprobs_mode),
        ],
        rounding.mean,
    )
    if best is not None:
        return best
    # Other prompts that the first turns may have been sampled under.
    prompts = dict(renderings(sample.rollout_ids))
    token_ids = [to_score.token_ids[row] for row in range(len(to_score))]
    if len({int(ids[0]) for ids in token_ids}) == 1:
        starts = [int(to_score.mask[row].argmax()) for row in range(len(to_score))]
        prompts["the file's prompt without its first token"] = [
            ids[1:end].tolist() if end > 1 else None for ids, end in zip(token_ids, starts, strict=True)
        ]
    best = best_of([_under(sample, model, name, prompts[name]) for name in prompts], rounding.mean)
    if best is not None:
        return best
    return truncated(probe, metadata.cut_by, rounding.token) or unexplained(probe, metadata.same_policy, list(prompts))


def _under(
    sample: ScoredSample, model: PolicyModel, name: str, prompts: Sequence[Sequence[int] | None]
) -> Explanation | None:
    """The first turns' log-probs under other prompts, one per sequence."""
    to_score, number = sample.to_score, sample.probe.number
    ids, masks, temperature, tokens = [], [], [], []
    for row, prompt in enumerate(prompts):
        scored = to_score.scores.span(row)
        size = int((number[scored] == 0).sum())
        token_ids, begin = to_score.token_ids[row], int(to_score.mask[row].argmax())
        # A sequence whose first turn is not scored here, or that was rendered like this, is no evidence.
        if not prompt or not size or number[scored.start] != 0 or np.array_equal(prompt, token_ids[:begin]):
            continue
        ids.append(np.concatenate([np.asarray(prompt, np.int32), token_ids[begin : begin + size]]))
        masks.append(np.arange(len(ids[-1])) >= len(prompt))
        temperature.append(to_score.temperature[row])
        tokens.append(np.arange(scored.start, scored.start + size))
    if not ids:
        return None
    other = ToScore(Ragged.of_arrays(ids, np.int32), Ragged.of_arrays(masks, np.bool_), np.array(temperature))
    first_turns = sample.probe.take(np.concatenate(tokens))
    after = mean_apart(first_turns.saved, model.log_probs(other)[0])
    text = f"a wrong template: the saved log-probabilities are those under {name}, not under the prompts in the file"
    return Explanation("template", text, first_turns.apart, after)
