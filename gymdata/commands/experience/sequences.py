"""Experiences: the sequences of a batch of rollouts, each token with its advantage and return.

Credit is given over a rollout's sampled tokens in turn order, as one sequence, and then cut to the sequences that are
trained; context has advantage 0 and mask 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import credit
from gymdata.commands.experience.settings import ExperienceConfig
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.rollouts.ragged import Array, Ragged
from gymdata.rollouts.schema import EXPERIENCES, HEAD
from gymdata.rollouts.sequences import RolloutSequences, SampledTokens, head_columns

#: Columns of the rollout, besides its id, that are copied to each of its sequences.
CARRIED = ("run_id", "task_id", "group_id", "temperature", "policy_hash", "policy_version")
#: Token columns that may come from other files: one number per sampled token, in turn order.
EVIDENCE = ("ref_logprobs", "values", "entropy", "teacher_logprobs", "sum_pi_squared")
#: The most ids of a token's head in the file.
MOST_TOP_IDS = 64


@dataclass(slots=True)
class Credited:
    """One number per sampled token: float64 advantages and returns, and other columns that were requested."""

    advantages: Array
    returns: Array
    kl: Array | None = None
    chosen: Array | None = None
    evidence: dict[str, Array] = field(default_factory=dict)

    def restrict(self, tokens: Array) -> None:
        """Train only those sampled tokens that are true in ``tokens`` (and were chosen so far)."""
        self.chosen = tokens if self.chosen is None else self.chosen & tokens


def give_credit(
    sampled: SampledTokens,
    outcome: Array | None,
    steps: Array | None,
    config: ExperienceConfig,
    evidence: Mapping[str, Array] | None = None,
    bootstrap: Array | None = None,
    turns: Array | None = None,
) -> Credited:
    """Advantages before whitening and clipping.

    ``outcome``: the shaped reward of each rollout of the batch; ``steps``: the shaped reward of each kept turn (NaN
    where it has none); ``evidence``: any of ``EVIDENCE``, one number per sampled token; ``bootstrap``: a value for each
    rollout after its last token; ``turns``: the advantage of each kept turn, of all its tokens. Raises UsageError when
    a KL is requested without ``ref_logprobs``, an entropy mask without ``entropy``, or a teacher without its log-probs.
    """
    columns, by_rollout = dict(evidence or {}), sampled.logprobs
    result = Credited(np.empty(0), np.empty(0), evidence=columns)
    if config.entropy_ratio is not None:
        entropy = _needed(columns, "entropy")
        result.chosen = credit.high_entropy_mask_ragged(entropy, by_rollout.offsets, config.entropy_ratio)
    if "ref_logprobs" in columns or config.kl_coef > 0:
        reference = _needed(columns, "ref_logprobs")
        result.kl = credit.kl(by_rollout.values, reference, config.kl_estimator).astype(np.float64)
    _give_returns(result, sampled, outcome, steps, config, bootstrap)
    if turns is not None:
        result.returns = result.advantages = result.advantages + np.repeat(turns, sampled.turn_sizes)
    if config.teacher_coef:
        # −(log π − log π_teacher) of the sampled token: an estimate of −KL(π ‖ π_teacher), without discount.
        apart = by_rollout.values - _needed(columns, "teacher_logprobs").astype(np.float64)
        result.advantages = result.advantages - config.teacher_coef * apart
    return result


def _give_returns(
    result: Credited,
    sampled: SampledTokens,
    outcome: Array | None,
    steps: Array | None,
    config: ExperienceConfig,
    bootstrap: Array | None,
) -> None:
    """Discounted sums of the rewards less the KL, or GAE of them."""
    by_rollout, values = sampled.logprobs, result.evidence.get("values")
    plain = config.gamma == 1 and not config.kl_coef > 0
    if config.estimator == "gae":
        plain = plain and config.lam == 1 and values is None
    if outcome is not None and steps is None and plain:  # nothing is discounted, or added on the way
        result.returns = result.advantages = by_rollout.spread(outcome)
        return
    offsets = by_rollout.offsets
    rewards = np.zeros(int(offsets[-1]), np.float64) if outcome is None else _at_the_end(outcome, offsets)
    if steps is not None:
        # A turn that sampled nothing gives its reward to the token before it.
        has = np.isfinite(steps) & (by_rollout.lengths > 0)[sampled.turn_rollout]
        last = np.maximum(sampled.turn_ends[has] - 1, offsets[:-1][sampled.turn_rollout[has]])
        np.add.at(rewards, last, steps[has])
    if result.kl is not None and config.kl_coef > 0:
        rewards -= config.kl_coef * result.kl
    step: Any = config.gamma
    if config.discount_unit == "turn":
        # γ after each turn's last token, 1 after the others.
        step = np.ones(len(rewards), np.float64)
        step[sampled.turn_ends[sampled.turn_sizes > 0] - 1] = config.gamma
    if config.estimator == "gae":
        values = np.zeros(len(rewards)) if values is None else values.astype(np.float64)
        result.advantages, result.returns = credit.gae_ragged(rewards, values, offsets, step, config.lam, bootstrap)
    else:
        result.returns = result.advantages = credit.cumulative_returns_ragged(rewards, by_rollout.offsets, step)


def _needed(columns: Mapping[str, Array], name: str) -> Array:
    if name not in columns:
        what, flag = {
            "entropy": ("an entropy mask needs", "--reference"),
            "ref_logprobs": ("a KL to a reference needs", "--reference"),
            "teacher_logprobs": ("distillation needs", "--teacher"),
        }[name]
        raise UsageError(
            f"{what} the column {name!r} for the sampled tokens, and there is none",
            hint=f"{flag} MODEL computes it, --token-columns FILE brings it; or leave the setting out",
        )
    return columns[name]


def _at_the_end(outcome: Array, offsets: Array) -> Array:
    rewards = np.zeros(int(offsets[-1]), np.float64)
    filled = offsets[1:] > offsets[:-1]
    rewards[offsets[1:][filled] - 1] += outcome[filled]
    return rewards


def finish(credited: Credited, config: ExperienceConfig, moments: credit.Moments | None) -> Credited:
    """Whiten (or normalise) with the moments of all advantages, then clip."""
    values = credited.advantages
    everywhere = np.ones(len(values), np.bool_)
    if config.whiten:
        values = credit.whiten(values, everywhere, moments)
    if config.normalize_cross_batch:
        values = credit.normalize_cross_batch(values, everywhere, config.mean_only, moments)
    credited.advantages = credit.clip(values, config.advantage_clip)
    return credited


def rows(
    sequences: RolloutSequences,
    credited: Credited,
    rollouts: pa.RecordBatch,
    numbers: Mapping[str, pa.Array],
    *,
    heads: bool = False,
) -> pa.Table:
    """The experiences rows of ``sequences``. ``rollouts`` has ids, turns and the columns ``CARRIED``, one row a rollout of
    the batch, and ``numbers`` further columns like that; ``heads``: with the columns ``HEAD``."""
    carried = {**{name: rollouts.column(name) for name in ("rollout_id", *CARRIED)}, **numbers}
    if not np.array_equal(sequences.rollout, np.arange(rollouts.num_rows)):
        of = pa.array(sequences.rollout)
        carried = {name: column.take(of) for name, column in carried.items()}
    _refuse_beyond_float32("advantages", credited.advantages)
    if credited.returns is not credited.advantages:
        _refuse_beyond_float32("returns", credited.returns)
    trained = sequences if credited.chosen is None else sequences.restricted(credited.chosen)
    advantages = trained.to_sequences(credited.advantages)
    same = credited.returns is credited.advantages and credited.chosen is None
    tokens: dict[str, Ragged] = {
        "input_ids": sequences.token_ids,
        "loss_mask": trained.loss_mask,
        "logprobs": sequences.logprobs,
        "advantages": advantages,
        "returns": advantages if same else sequences.to_sequences(credited.returns),
        "turn_starts": sequences.turn_starts,
    }
    tokens |= {name: sequences.to_sequences(values) for name, values in credited.evidence.items()}
    if credited.kl is not None:
        tokens["kl"] = sequences.to_sequences(credited.kl)
    columns = {**carried, "sequence_index": pa.array(sequences.index)}
    columns |= {name: lists.to_arrow() for name, lists in tokens.items()}
    columns |= _heads(trained, rollouts.column("turns")) if heads else {}
    fields = [f for f in EXPERIENCES.schema if f.name in columns]
    return pa.table([columns[f.name] for f in fields], schema=pa.schema(fields))


def _heads(sequences: RolloutSequences, turns: pa.ListArray) -> dict[str, pa.ListArray]:
    """``head_columns``. Raises RefusedError for more than ``MOST_TOP_IDS`` ids of a token."""
    columns = head_columns(sequences, turns)
    most = pc.max(pc.list_value_length(columns[HEAD[0]].flatten())).as_py() or 0
    if most > MOST_TOP_IDS:
        raise RefusedError(
            f"top_log_probs has {most:,} ids of one token, experiences hold at most {MOST_TOP_IDS}",
            hint=f"collect with --top-logprobs {MOST_TOP_IDS} or fewer",
        )
    return columns


def _refuse_beyond_float32(what: str, values: Array) -> None:
    """Raises DataError for a number beyond float32, which would silently become infinite in the file."""
    # NaN compares as false.
    fits = np.abs(values) <= np.finfo(np.float32).max
    if not bool(fits.all()):
        worst = values[np.argmin(fits)]
        raise RefusedError(
            f"{what} are not finite in float32 (first: {worst:.3g}): the rewards are too large",
            code="R502",
            hint="--reward-clip limits them",
        )


def evidence_of(sampled: SampledTokens, columns: Mapping[str, pa.ListArray], rollout_ids: pa.Array) -> dict[str, Array]:
    """Token columns of a batch (one list per rollout, one number per sampled token in turn order, or per one that is
    trained where turns are left out), flat."""
    result = {}
    for name, column in columns.items():
        lists, lengths = Ragged.of(column), sampled.logprobs.lengths
        if sampled.of_all is not None and np.array_equal(lists.lengths, sampled.of_all[0]):
            result[name] = lists.values[sampled.of_all[1]]
            continue
        for row in np.flatnonzero(lists.lengths != lengths)[:1]:
            raise DataError(
                f"rollout {rollout_ids[int(row)].as_py()}: {name} has {lists.lengths[row]} numbers, the rollout has "
                f"{lengths[row]} sampled tokens"
            )
        result[name] = lists.values
    return result
