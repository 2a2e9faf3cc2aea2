"""From scored rollouts to credited sequences, a batch at a time: rewards first, then as many passes over tokens as needed.

Group statistics are of the whole input; a pass gives the same batches in the same order as the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import credit
from gymdata.commands.experience import group_rewards
from gymdata.commands.experience import sequences as experiences
from gymdata.commands.experience.group_rewards import Shaped
from gymdata.commands.experience.scalars import Scalars
from gymdata.commands.experience.settings import ExperienceConfig
from gymdata.commands.experience.token_scores import Scorers, score_tokens
from gymdata.commands.experience.turn_credit import sum_pi_squared, turn_advantages
from gymdata.credit.estimators import ALL
from gymdata.errors import DataError, RefusedError, UsageError, abridged, counted, first_line
from gymdata.progress import Progress
from gymdata.public import Figures, Report, Row
from gymdata.rollouts.ragged import offsets_of
from gymdata.rollouts.schema import AUDIT, HEADED_ROWS, HEADS, ROLLOUTS
from gymdata.rollouts.sequences import RolloutSequences, require_agents, stitch
from gymdata.scores.chosen import other_scores, unscored_hint
from gymdata.store import scan_batches
from gymdata.store.lineage import keys_of, vocabulary

#: Rollouts whose tokens are in memory at a time; ``HEADED_ROWS`` of those with heads.
BATCH_ROWS = 4_096
#: The name under which ``collect`` stores the sum of a rollout's step rewards.
SUM_OF_STEPS = "steps"
_NOT_SCORED, _NOT_FINITE, _TRUNCATED, _NO_TOKENS = "not_scored", "reward_not_finite", "truncated", "nothing_generated"
_REASONS = (_NOT_SCORED, _NOT_FINITE, _TRUNCATED, _NO_TOKENS, "in_a_dropped_group", "no_baseline")
#: The code of a rollout that its writer masked; what it says is its reason.
_MASKED = len(_REASONS) + 1


@dataclass(slots=True, repr=False)
class ExperiencesReport(Report):
    """What ``gymdata.experience`` wrote. ``left_out``: rollouts by reason; ``dropped_groups``: reason → group ids;
    ``advantage``: mean and spread before normalisation; ``kl``: where there is a reference, the mean per token and the
    coefficient, with ``kl_target`` also ``next_coef``; ``notes``: caveats for the reader."""

    path: Path
    estimator: str
    score: str
    counts: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    dropped_groups: dict[str, list[str]] = field(default_factory=dict)
    advantage: dict[str, float] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> Figures:
        """The report without the group ids, which run.json has."""
        dropped = {reason: len(groups) for reason, groups in self.dropped_groups.items()}
        return asdict(self) | {"path": str(self.path), "dropped_groups": dropped}

    def rows(self) -> list[Row]:
        counts = self.counts
        return [
            ("rollouts", counts["rollouts"]),
            *((f"  left out: {why if ': ' in why else why.replace('_', ' ')}", n) for why, n in self.left_out.items()),
            ("groups", counts["groups"]),
            *((f"  dropped: {why.replace('_', ' ')}", len(ids)) for why, ids in self.dropped_groups.items()),
            ("sequences", counts["sequences"]),
            *([("  rollouts cut into several", counts["rollouts_cut"])] if counts["rollouts_cut"] else []),
            *([("  abandoned turns dropped", counts["abandoned_turns"])] if counts["abandoned_turns"] else []),
            ("trained tokens", counts["trained_tokens"]),
            ("advantage, mean", self.advantage["mean"]),
            ("advantage, std", self.advantage["std"]),
            *([("KL per token, mean", self.kl["mean"])] if self.kl else []),
            *([("  --kl-coef for the next rollouts", self.kl["next_coef"])] if "next_coef" in self.kl else []),
            ("written to", self.path),
        ]


class Crediting:
    """The rollouts of a call: their scalars in memory, their tokens read batch by batch, as often as needed."""

    def __init__(
        self,
        sources: Sequence[str | Path],
        rollouts: Scalars,
        scores: np.ndarray,
        config: ExperienceConfig,
        score: str,
        max_new: int | None = None,
        parts: Mapping[str, np.ndarray] | None = None,
        baselines: np.ndarray | None = None,
    ) -> None:
        self.sources, self.rollouts, self.score = sources, rollouts, score
        self.scores, self.max_new, self.parts = scores, max_new, parts
        self.baselines = baselines  #: what each rollout's reward is compared with, NaN for nothing
        self.groups, self.group_ids = rollouts.groups, rollouts.group_ids
        estimator = ALL[config.estimator]
        # With a discount, turns of equal outcomes still differ by their distance from the end.
        drop = estimator.compares and not (estimator.turns is not None and config.gamma < 1)
        taught = config.teacher is not None or config.estimator == "teacher"
        #: The settings with what the estimator decides.
        self.config = config.model_copy(
            update={
                "whiten": config.whiten or estimator.whitens,
                "teacher_coef": config.teacher_coef if taught else 0.0,
                "zero_variance": config.zero_variance or ("drop" if drop else "keep"),
            }
        )
        self.evidence: Mapping[str, pa.ListArray] = {}
        if config.token_columns is not None:
            assert rollouts.named is not None
            self.evidence = read_evidence(config.token_columns, rollouts.named["rollout_id"].combine_chunks())
        #: Whether a turn of any rollout has saved alternatives.
        self.heads = any(
            batch.column(0).flatten().field("top_log_probs").null_count < len(batch.column(0).flatten())
            for source in sources
            for batch in scan_batches(source, HEADS, ("turns",), HEADED_ROWS)
        )
        self._of_steps = rollouts.reward_names == {SUM_OF_STEPS}
        rollouts.named = None  # frees the texts of all rollouts
        self.after: np.ndarray | None = None  #: the value after each rollout's last token, where a critic gave one
        self._turns: np.ndarray | None = None
        self._baseline: credit.TokenBaseline | None = None
        if config.target_agents:
            turns = (b.column("turns") for s in sources for b in scan_batches(s, ROLLOUTS, ("turns",), BATCH_ROWS))
            require_agents(turns, config.target_agents, ", ".join(map(str, sources)))

    def shape(self, report: ExperiencesReport) -> Shaped:
        """Rewards of all rollouts, shaped; fills the account."""
        config, rollouts = self.config, self.rollouts
        why = np.zeros(len(rollouts), np.int8)
        uses_outcome, uses_steps = config.rewards != "steps", config.rewards != "outcome"
        if uses_outcome and uses_steps and config.reward is None and self._of_steps:
            raise UsageError(
                "the reward of these rollouts is the sum of their steps, which would count twice",
                hint="--rewards steps; or score them, and name the score with --reward",
            )
        outcome = self.scores.copy() if uses_outcome else None
        if ALL[config.estimator].reads == "none":
            outcome = np.zeros(len(rollouts))
        steps = owner = None
        if outcome is not None:
            why[np.isnan(outcome)], why[np.isinf(outcome)] = 1, 2
        why[list(rollouts.masked)] = _MASKED
        if uses_steps:
            steps, owner = self._step_rewards()
            if not np.isfinite(steps).any():
                raise RefusedError(
                    "no turn of these rollouts has a reward of its own",
                    code="R501",
                    hint="--rewards outcome uses the rollout's reward",
                )
            infinite = np.unique(owner[np.isinf(steps)])
            has = np.bincount(owner[np.isfinite(steps)], minlength=len(why)) > 0
            why[(why == 0) & ~has & (outcome is None)] = 1
            why[infinite[why[infinite] != _MASKED]] = 2
        if self.baselines is not None and outcome is not None:
            outcome -= self.baselines
            why[(why == 0) & np.isnan(self.baselines)] = 6
        truncated = rollouts.truncated
        if config.truncated == "drop":
            why[(why == 0) & truncated] = 3
        generated = rollouts.generated
        if outcome is not None:
            outcome[why > 0] = np.nan
        if steps is not None and owner is not None:
            steps = np.where(why[owner] > 0, np.nan, steps)
        why[(why == 0) & (generated == 0)] = 4
        self._refuse_nothing(why, generated)
        shaped = group_rewards.shape(
            self.groups,
            config,
            outcome=outcome,
            penalty=self._overlong(generated),
            steps=steps,
            step_owner=owner,
            parts=self.parts,
            lengths=generated,
        )
        why[(why == 0) & ~shaped.keep] = 5
        shaped.keep &= why == 0
        report.left_out = {reason: n for code, reason in enumerate(_REASONS, 1) if (n := int((why == code).sum()))}
        report.left_out |= Counter(rollouts.masked.values())
        report.dropped_groups = {
            reason: self.group_ids.take(pa.array(codes)).to_pylist() for reason, codes in shaped.dropped.items()
        }
        report.counts |= {
            "rollouts": len(rollouts),
            "groups": len(self.group_ids),
            "groups_dropped": sum(map(len, shaped.dropped.values())),
            "rollouts_used": int(shaped.keep.sum()),
        }
        if not shaped.keep.any():
            only = np.unique(outcome[np.isfinite(outcome)]) if outcome is not None else np.empty(0)
            dropped = (f"{len(ids):,} {reason.replace('_', ' ')}" for reason, ids in report.dropped_groups.items())
            raise RefusedError(
                f"nothing is left of {counted(len(rollouts), 'rollout')}: all groups are dropped ({'; '.join(dropped)})",
                code="R503",
                hint=(
                    f"every {self.score} is {only[0]:g}: is it right? `gymdata score RUN --reward SPEC -n 20` tries another"
                    if len(only) == 1
                    else "collect more rollouts per task at a higher temperature, or --zero-variance keep"
                )
                + other_scores(self.sources, self.score),
            )
        cut = int((shaped.keep & truncated).sum())
        if cut and (config.critic is None if config.estimator == "gae" else config.gamma < 1):
            report.notes.append(f"{cut:,} truncated rollouts count as ended: no value is known after their last token")
        if config.critic is not None and config.estimator != "gae":
            report.notes.append(f"values are in the file, but {config.estimator} does not use them")
        if config.estimator == "gae" and config.critic is None and "values" not in self.evidence:
            report.notes.append("no values were given: every V is 0, so advantages are λ-discounted returns")
        if (least := ALL[config.estimator].least) is not None:
            n_scored = np.bincount(self.groups[np.isfinite(self.scores)], minlength=len(self.group_ids))
            if small := int(((n_scored > 0) & (n_scored < config.own_settings[least])).sum()):
                report.notes.append(
                    f"{counted(small, 'group has', 'groups have')} fewer than {config.own_settings[least]} scored rollouts "
                    f"({least}): their advantages are 0"
                )
        return shaped

    def _overlong(self, generated: np.ndarray) -> np.ndarray | None:
        config = self.config
        if config.overlong_buffer is None:
            return None
        if config.rewards == "steps":
            raise UsageError(
                "the overlong penalty is part of the outcome, and --rewards steps leaves it out",
                hint="--rewards outcome or steps+outcome",
            )
        assert self.max_new is not None
        return credit.overlong_penalty(generated, self.max_new, config.overlong_buffer, config.overlong_factor)

    def _step_rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """Raw rewards of all kept turns and their rollouts' rows, in the order in which ``batches`` gives them."""
        rewards, owners = [], []
        for row, sequences, _ in self.batches():
            rewards.append(sequences.sampled.turn_reward)
            owners.append(sequences.sampled.turn_rollout + row)
        return np.concatenate(rewards), np.concatenate(owners)

    def _refuse_nothing(self, why: np.ndarray, generated: np.ndarray) -> None:
        n = len(why)
        if bool(np.isin(why, (1, 2, _MASKED)).all()):
            raise RefusedError(
                f"none of the {n:,} rollouts has a score {self.score!r}",
                code="R501",
                hint=unscored_hint(self.sources, self.score),
            )
        if not generated.any():
            raise RefusedError(
                f"none of the {n:,} rollouts has token ids, so none can be trained as sampled",
                code="T205",
                hint="collect with gymdata, or import files that carry token ids",
            )

    def batches(self, carried: Sequence[str] = ()) -> Iterator[tuple[int, RolloutSequences, pa.RecordBatch]]:
        """(row of the first rollout, the batch's sequences, its ids, turns and columns ``carried``), in the order of
        ``rollouts``."""
        row, sizes = 0, {source: vocabulary(source) for source in self.sources}
        for source in self.sources:
            names, size = ("rollout_id", "turns", "extra", *carried), HEADED_ROWS if self.heads else BATCH_ROWS
            for batch in scan_batches(source, ROLLOUTS, names, size):
                # A run that is being collected may have grown; the new rows were not scored when we began.
                batch = batch.slice(0, len(self.rollouts) - row)
                ids = batch.column("rollout_id")
                if not np.array_equal(keys_of(ids), self.rollouts.keys[row : row + len(ids)]):
                    raise DataError(f"{source}: changed while it was read", hint="run the command again")
                if batch.num_rows:
                    turns = batch.column("turns")
                    abandoned, extra = self.config.abandoned, batch.column("extra")
                    stitched = stitch(turns, ids, abandoned, extra, where=str(source), vocab_size=sizes[source])
                    yield row, stitched, batch
                    row += batch.num_rows

    def fill(self, shaped: Shaped, models: Scorers, progress: Progress) -> None:
        """Fill reference log-probs, entropy, values and the teacher's log-probs of the kept rollouts from models."""
        columns, after = score_tokens(self.batches(), shaped.keep, self.rollouts.temperature, models, progress)
        twice = sorted(set(columns) & set(self.evidence))
        if twice:
            raise UsageError(f"--token-columns and a model both give {abridged(twice)}", hint="leave one of them out")
        self.evidence = {**self.evidence, **columns}
        self.after = None if after is None else np.where(self.rollouts.truncated, after, 0.0)

    def credited(
        self, shaped: Shaped, carried: Sequence[str] = ()
    ) -> Iterator[tuple[int, RolloutSequences, experiences.Credited, pa.RecordBatch]]:
        """Every batch with its credit, before whitening; the last item is its rows (see ``batches``)."""
        if self.config.estimator == "otb" and self._baseline is None:
            self._baseline = self._baseline_of(shaped)
        for row, sequences, batch, credited in self._with_returns(shaped, carried):
            if self._baseline is not None:
                token_mask, offsets, groups = self._kept_tokens(shaped, row, sequences)
                beside = credited.advantages - credited.returns
                beside[token_mask] += self._baseline.subtracted(credited.returns[token_mask], offsets, groups)
                credited.advantages = beside
            if self.config.target_agents:
                credited.restrict(sequences.sampled.of_agents(self.config.target_agents))
            yield row, sequences, credited, batch

    def _baseline_of(self, shaped: Shaped) -> credit.TokenBaseline:
        """The baseline of each position of each group's rollouts."""
        baseline = credit.TokenBaseline.of(self.groups, self.rollouts.generated * shaped.keep)
        for row, sequences, batch, credited in self._with_returns(shaped):
            sampled, keep = sequences.sampled, shaped.keep[row : row + batch.num_rows]
            token_mask, offsets, groups = self._kept_tokens(shaped, row, sequences)
            squares = credited.evidence.get("sum_pi_squared")
            if squares is None:
                squares = sum_pi_squared(batch, sampled, keep)
            energy = credit.gradient_energy(sampled.logprobs.values, squares)
            baseline.add(credited.returns[token_mask], energy[token_mask], offsets, groups)
        return baseline

    def _kept_tokens(
        self, shaped: Shaped, row: int, sequences: RolloutSequences
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which sampled tokens of a batch are of kept rollouts; the offsets of these rollouts, and their groups."""
        by_rollout = sequences.sampled.logprobs
        keep = shaped.keep[row : row + len(by_rollout)]
        return by_rollout.spread(keep), offsets_of(by_rollout.lengths[keep]), self.groups[row : row + len(keep)][keep]

    def _with_returns(
        self, shaped: Shaped, carried: Sequence[str] = ()
    ) -> Iterator[tuple[int, RolloutSequences, pa.RecordBatch, experiences.Credited]]:
        """Every batch with its credit, before baselines of places."""
        if ALL[self.config.estimator].turns is not None and self._turns is None:
            self._turns = turn_advantages(self.batches(), shaped, self.groups, self.config)
        turn = 0
        for row, sequences, batch in self.batches(carried):
            n, sampled = batch.num_rows, sequences.sampled
            outcome = None if shaped.outcome is None else np.nan_to_num(shaped.outcome[row : row + n])
            columns = {name: column.slice(row, n) for name, column in self.evidence.items()}
            after = None if self.after is None else self.after[row : row + n]
            here = slice(turn, turn + len(sampled.turn_reward))
            turn = here.stop
            steps = None if shaped.steps is None else shaped.steps[here]
            evidence = experiences.evidence_of(sampled, columns, batch.column("rollout_id"))
            if self._turns is not None:
                outcome = steps = None
            turns = None if self._turns is None else self._turns[here]
            credited = experiences.give_credit(sampled, outcome, steps, self.config, evidence, after, turns)
            yield row, sequences, batch, credited

    def moments(self, shaped: Shaped) -> credit.Moments | None:
        """The moments of the advantages of kept rollouts, of ``target_agents`` where they are named, if they are
        normalised."""
        config = self.config
        if not (config.whiten or config.normalize_cross_batch):
            return None
        total = credit.Moments()
        for row, sequences, credited, batch in self.credited(shaped):
            keep = shaped.keep[row : row + batch.num_rows]
            advantages = tokens_of(credited.advantages, sequences, keep, config.target_agents)
            total = credit.running_moments(total, advantages)
        return total


def refuse_short_horizon(rollouts: int, config: ExperienceConfig) -> None:
    """With more than five horizons of rollouts at once the coefficient could become 0 or less (see ``adaptive_kl``)."""
    if config.kl_target is not None and 0.2 * rollouts >= config.kl_horizon:
        raise UsageError(
            f"--kl-horizon {config.kl_horizon:g} is too short for {rollouts:,} rollouts: the coefficient could become 0",
            hint=f"give a multiple of them, such as --kl-horizon {10 * rollouts}",
        )


def kl_account(seen: credit.Moments, rollouts: int, config: ExperienceConfig) -> dict[str, float]:
    """For the report. ``seen``: the KLs of all sampled tokens, of ``rollouts`` rollouts. The coefficient is adapted as
    by LightRFT's trainer, whose KL is a mean over tokens and whose n counts samples."""
    if not seen.count:
        return {}
    account = {"mean": seen.mean, "coef": config.kl_coef}
    if config.kl_target is not None:
        account["next_coef"] = credit.adaptive_kl(
            config.kl_coef, seen.mean, config.kl_target, rollouts, config.kl_horizon
        )
    return account


def tokens_of(
    values: np.ndarray, sequences: RolloutSequences, keep: np.ndarray, agents: Collection[str] = ()
) -> np.ndarray:
    """The numbers of the sampled tokens of kept rollouts, and of ``agents`` only where they are named."""
    if keep.all() and not agents:
        return values
    chosen = sequences.sampled.logprobs.spread(keep)
    return values[chosen & sequences.sampled.of_agents(agents) if agents else chosen]


def read_evidence(path: Path, ids: pa.Array) -> Mapping[str, pa.ListArray]:
    """Token columns for every rollout, in order. Of an audit's folder, its columns are meant."""
    if path.is_dir():
        path = path / f"{AUDIT.name}.parquet"
    from gymdata.store.parquet import parquet_file

    if not path.exists():
        raise DataError.missing_path(path, "a Parquet table for --token-columns")
    try:
        with parquet_file(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DataError.unreadable(path, first_line(error)) from error
    names = [name for name in experiences.EVIDENCE if name in table.column_names]
    if "rollout_id" not in table.column_names or not names:
        columns = [] if "rollout_id" in table.column_names else ["rollout_id"]
        columns += [] if names else ["one of " + " ".join(experiences.EVIDENCE)]
        raise DataError.missing_columns(path, "token columns", columns, table.column_names)
    rows = pc.index_in(ids, value_set=table["rollout_id"].combine_chunks())
    if rows.null_count:
        missing = ids.filter(pc.is_null(rows))[0].as_py()
        raise DataError(f"{path}: has no row for {rows.null_count:,} of the rollouts (first: {missing})")
    lists = {name: table[name].cast(pa.list_(pa.float32())).combine_chunks() for name in names}
    return {name: column.take(rows) for name, column in lists.items()}
