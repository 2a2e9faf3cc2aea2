"""``gymdata audit``: every sampled token scored by a model, compared with what was saved, and the cause of a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from gymdata.checks.violations import Violation
from gymdata.commands.audit import compare as audit
from gymdata.commands.audit.causes import Explanation, ScoredSample
from gymdata.commands.audit.compare import LogprobComparison
from gymdata.errors import DataError, RefusedError, counted
from gymdata.models.scoring import PolicyModel, ToScore
from gymdata.progress import Progress
from gymdata.public import Figures, Report, Row
from gymdata.rollouts.logprobs import MEANS, Rounding
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import alternatives, stitch
from gymdata.rollouts.soundness import without_ratio
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store import scan_batches
from gymdata.store.paths import Facts

#: Rollouts whose tokens are in memory at a time.
_BATCH_ROWS = 1_024
#: Why a rollout has nothing to compare.
_NO_SAMPLER = "ids rendered from text have no sampler's logprobs: there is nothing to audit, and no ratio for batch RL"
_LACKS = ("T205", "T213", "L301", "L302", "L303")


@dataclass(slots=True, repr=False)
class AuditReport(Report):
    """The result of ``audit``. ``first``: what the files themselves say about policy, tokenizer and sampling, reported
    first.

    ``summary``: figures over all tokens (``compare.summary``); ``positions`` and ``turns``: the same by place;
    ``worst``: the tokens furthest apart; ``explanation``: why, None when nothing is wrong; ``path``: what was written.
    """

    model: Facts
    rounding: Rounding
    first: list[str] = field(default_factory=list)
    summary: Figures = field(default_factory=dict)
    positions: list[Figures] = field(default_factory=list)
    turns: list[Figures] = field(default_factory=list)
    worst: list[Figures] = field(default_factory=list)
    explanation: Explanation | None = None
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    path: Path | None = None

    @property
    def ok(self) -> bool:
        """The saved log-probabilities are the model's."""
        return not self.violations

    def to_dict(self) -> Figures:
        return {
            "ok": self.ok,
            "path": None if self.path is None else str(self.path),
            "model": self.model,
            "tolerance": self.rounding.token,
            "rounding": self.rounding._asdict(),
            "lineage": self.first,
            **self.summary,
            "explanation": None if self.explanation is None else self.explanation.as_json(),
            "notes": self.notes,
            "left_out": self.left_out,
            "by_position": self.positions,
            "by_turn": self.turns,
            "worst": self.worst,
            "violations": [v.as_dict() for v in self.violations],
        }

    def verdict(self) -> list[str]:
        """What follows from the figures, for people; the cause comes last."""
        summary, tokens = self.summary, counted(self.summary["tokens"], "token")
        if self.ok:
            few, outliers = summary["tokens_beyond_tolerance"], summary["tokens_beyond_rounding"]
            rest = f": {few:,} of {tokens} more than {self.rounding.token:g} apart, which rounding explains"
            if outliers:  # a few do not decide, but are no rounding either
                where = "".join(f", in rollout {t['rollout_id']}, turn {t['turn']}" for t in self.worst[:1])
                mean, furthest = summary["ratio"]["mean"], summary["max_abs_difference"]
                refuses = f"train-rl refuses a mean ratio of {mean:.3g}, unless its loss has no ratios"
                rest = f", but rounding cannot explain {outliers:,} of {tokens}: the largest difference is "
                rest += f"{furthest:.4g} nats{where}; "
                rest += "train-rl trains with them" if MEANS[0] <= mean <= MEANS[1] else refuses
            return [f"the saved log-probabilities are the model's{rest}"]
        lines = []
        if any(v.code == "L306" for v in self.violations):
            lines.append(
                "the saved log-probabilities cannot be a sampler's (L306): export those that the engine returned"
            )
        if off := [v for v in self.violations if v.turn is not None]:
            lines.append(f"L305 in {counted(len(off), 'turn')} of {counted(len({v.row for v in off}), 'rollout')}")
        lines += [f"L305: {line}" for line in summary["departures"]]
        if (cause := self.explanation) is not None:
            lines.append(f"{'cause' if cause.certain else 'likely cause'}: {cause.text}")
            if cause.after is not None:
                lines.append(f"with it, mean |Δ| falls from {cause.before:.4g} to {cause.after:.4g}")
        return lines

    def rows(self) -> list[Row]:
        summary, ratio = self.summary, self.summary["ratio"]
        return [
            ("rollouts, tokens", f"{summary['rollouts']:,}, {summary['tokens']:,}"),
            *((f"  left out: {code}", n) for code, n in self.left_out.items()),
            *([("  T213 means", _NO_SAMPLER)] if "T213" in self.left_out else []),
            ("max |Δ log p|", summary["max_abs_difference"]),
            ("mean |Δ log p|", summary["mean_abs_difference"]),
            (f"tokens beyond {self.rounding.token:g}", summary["tokens_beyond_tolerance"]),
            ("ratio: mean, min, max", ", ".join(f"{ratio[k]:.6g}" for k in ("mean", "min", "max"))),
            ("ratio: 1 %, 50 %, 99 %", ", ".join(f"{ratio['quantiles'][q]:.6g}" for q in ("0.01", "0.5", "0.99"))),
            ("outside [0.9, 1.1]", f"{100 * summary['share_outside']:.2f} %"),
            ("KL sampler to model: k1, k3", f"{summary['kl_k1']:.3g}, {summary['kl_k3']:.3g}"),
            ("effective sample size", f"{100 * summary['effective_sample_size']:.1f} %"),
            *self._before_kept_sets(),
            *([("written to", self.path)] if self.path else []),
        ]

    def _before_kept_sets(self) -> list[Row]:
        """The figures above are over kept sets; these are what they were without."""
        if (before := self.summary.get("before_kept_sets")) is None:
            return []
        return [
            ("without kept sets: ratio, mean", before["mean"]),
            ("  outside [0.9, 1.1]", f"{100 * before['share_outside']:.2f} %"),
            ("  effective sample size", f"{100 * before['effective_sample_size']:.1f} %"),
        ]


class Audit:
    """One comparison. ``rollouts``: rollout_id and temperature of all of them, in order; ``chosen``: which are compared
    (sorted row numbers). After ``run``: ``compared``, ``entropy`` if requested, and ``samples``, on which explanations are
    tested. ``kept_sets``: each token's head is all that could be sampled, and the model is normalized over it."""

    def __init__(
        self,
        sources: Sequence[str | Path],
        rollouts: pa.Table,
        chosen: np.ndarray,
        model: PolicyModel,
        rounding: Rounding,
        *,
        kept_sets: bool = False,
    ) -> None:
        self.sources, self.chosen, self.model, self.rounding = sources, chosen, model, rounding
        self.kept_sets = kept_sets
        self._ids = rollouts["rollout_id"].combine_chunks()
        self._temperature = rollouts["temperature"].to_numpy()
        self.samples: list[ScoredSample] = []
        self.compared: LogprobComparison
        self.entropy: np.ndarray | None = None

    def run(self, report: AuditReport, *, entropy: bool = False, progress: Progress) -> None:
        """Score everything; fills the figures of ``report``. Raises RefusedError when nothing can be compared."""
        parts: list[LogprobComparison] = []
        all_entropies: list[np.ndarray] = []
        left = dict.fromkeys(_LACKS, 0)
        tokens = 0
        progress.update(done=0, total=len(self.chosen), tokens=0)
        for rows, turns, ids in self._batches():
            keep = comparable(turns, left)
            if keep.any():
                part, entropies = self._scored(
                    rows[keep], turns.filter(pa.array(keep)), ids.filter(pa.array(keep)), entropy
                )
                parts.append(part)
                all_entropies += [] if entropies is None else [entropies]
                tokens += len(part.saved)
            done = int(np.searchsorted(self.chosen, rows[-1])) + 1
            progress.update(done=done, total=len(self.chosen), tokens=tokens)
        report.left_out = {code: n for code, n in left.items() if n}
        if not parts:
            raise RefusedError(
                f"none of {counted(len(self.chosen), 'rollout')} has token ids with log-probabilities to compare",
                code=(code := max(left, key=lambda code: left[code])),
                hint=_NO_SAMPLER if code == "T213" else "`gymdata validate` lists what they lack",
            )
        self.compared = LogprobComparison.joined(parts)
        self.entropy = np.concatenate(all_entropies) if entropy else None
        report.summary = audit.summary(self.compared, self.rounding)
        report.positions, report.turns = audit.by_position(self.compared), audit.by_turn(self.compared)
        report.violations = audit.violations(self.compared, self.rounding, report.summary["departures"])

    def _batches(self) -> Iterator[tuple[np.ndarray, pa.ListArray, pa.Array]]:
        """(row numbers, turns, rollout_ids) of chosen rollouts, in order."""
        begin = 0
        for source in self.sources:
            for batch in scan_batches(source, ROLLOUTS, ("rollout_id", "turns"), _BATCH_ROWS):
                low, high = np.searchsorted(self.chosen, [begin, begin + batch.num_rows])
                rows = self.chosen[low:high]
                if len(rows):
                    selected = batch.take(pa.array(rows - begin))
                    if not selected.column("rollout_id").equals(self._ids.take(pa.array(rows))):
                        raise DataError(f"{source}: changed while it was read", hint="run the command again")
                    yield rows, selected.column("turns"), selected.column("rollout_id")
                begin += batch.num_rows

    def _scored(
        self, rows: np.ndarray, turns: pa.ListArray, ids: pa.Array, entropy: bool
    ) -> tuple[LogprobComparison, np.ndarray | None]:
        sequences = stitch(turns, ids)
        sampled, to_score = sequences.sampled, ToScore.of(sequences, self._temperature[rows])
        logps, entropies = self.model.log_probs(to_score, entropy=entropy)
        self.samples += ScoredSample.of(sequences, to_score, logps, ids, self.rounding)
        kept_mass = None
        if self.kept_sets:
            kept, _ = alternatives(turns, sampled)
            kept = kept if sequences.source is None else kept.take(sequences.source)
            kept_mass = sequences.in_turn_order(self.model.log_mass(to_score, kept))
        recomputed = sequences.in_turn_order(logps)
        compared = LogprobComparison(
            rollout_ids=ids.to_pylist(),
            rows=rows,
            offsets=sampled.logprobs.offsets,
            saved=sampled.logprobs.values,
            recomputed=recomputed if kept_mass is None else recomputed - kept_mass,
            turn_ends=sampled.turn_ends,
            turn_rollout=sampled.turn_rollout,
            turn_number=sampled.turn_number,
            kept_mass=kept_mass,
        )
        return compared, None if entropies is None else sequences.in_turn_order(entropies)

    def columns(self) -> pa.Table:
        """Rows of the audit table for all chosen rollouts; the lists of one that could not be compared are empty."""
        row_of = {name: i for i, name in enumerate(self.compared.rollout_ids)}
        ids = self._ids.take(pa.array(self.chosen))
        rows = pa.array([row_of.get(i) for i in ids.to_pylist()], pa.int64())
        empty = pa.scalar([], pa.list_(pa.float32()))
        columns = {"rollout_id": ids}
        for name, values in (("ref_logprobs", self.compared.recomputed), ("entropy", self.entropy)):
            if values is not None:
                columns[name] = Ragged(values, self.compared.offsets).to_arrow().take(rows).fill_null(empty)
        return pa.table(columns)


def comparable(turns: pa.ListArray, left: dict[str, int]) -> np.ndarray:
    """Which rollouts have a finite log-prob at most 0 for each of their sampled tokens, bool; ``left`` counts the others."""
    flat = TurnColumns.of(turns)
    generated = flat.generation.lengths
    # A generation without prompt ids cannot be scored.
    no_prompt = flat.count((flat.parent < 0) & (flat.delta.lengths == 0) & (generated > 0)) > 0
    lacking = (flat.by_rollout(flat.generation).lengths == 0) | no_prompt
    left["T205"] += int(lacking.sum())
    for code, of_turns in without_ratio(flat.logprobs, generated, flat.rendered):
        lacks = flat.count(of_turns) > 0
        left[code] += int((lacks & ~lacking).sum())
        lacking |= lacks
    return np.asarray(~lacking)
