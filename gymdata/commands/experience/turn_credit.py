"""Credit of turns and of places in a rollout: estimators that look at more than the rewards of a group's rollouts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from gymdata.commands.experience.group_rewards import Shaped
from gymdata.commands.experience.settings import ExperienceConfig
from gymdata.credit.estimators import ALL, TurnRewards
from gymdata.errors import RefusedError
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.ragged import Array
from gymdata.rollouts.sequences import RolloutSequences, SampledTokens, alternatives
from gymdata.rollouts.turn_columns import TurnColumns

Batches = Iterator[tuple[int, RolloutSequences, pa.RecordBatch]]


def turn_advantages(batches: Batches, shaped: Shaped, groups: Array, config: ExperienceConfig) -> Array:
    """The advantage of each kept turn by the estimator, 0 where its rollout is not kept.

    The state of a turn is what its prompt adds to what stood before: the tokens of the environment's last message, or of
    the whole first prompt."""
    owners, states, agents = [], [], []
    for row, sequences, batch in batches:
        sampled = sequences.sampled
        owners.append(sampled.turn_rollout + row)
        states.append(TurnColumns.of(batch.column("turns")).delta.take(sampled.turn).hashes())
        agents += [name or "" for name in sampled.turn_agent.to_pylist()]
    owner = np.concatenate(owners)
    rewards = TurnRewards(
        owner=owner,
        state=np.concatenate(states),
        agent=np.unique(agents, return_inverse=True)[1],
        reward=np.zeros(len(owner)) if shaped.steps is None else np.nan_to_num(shaped.steps),
        outcome=np.zeros(len(groups)) if shaped.outcome is None else np.nan_to_num(shaped.outcome),
        kept=shaped.keep,
        groups=groups,
        gamma=config.gamma,
    )
    credit_of = ALL[config.estimator].turns
    assert credit_of is not None
    return np.nan_to_num(credit_of(rewards, **config.own_settings))


def sum_pi_squared(batch: pa.RecordBatch, sampled: SampledTokens, keep: Array) -> Array:
    """Σπ² over the saved most likely tokens of each sampled token, float64: what is left out adds at most the rest of the
    probability times the smallest saved one. Raises RefusedError where a ``keep`` rollout (bool, one each) has none, and for
    what is no log-probability."""
    _, logprobs = alternatives(batch.column("turns"), sampled)
    if len(odd := np.flatnonzero(~(logprobs.values <= POSITIVE_TOLERANCE))):
        row, position = sampled.token_ids.locate(int(logprobs.owner[odd[0]]))
        where = f"sampled token {position} of {batch.column('rollout_id')[row]}"
        raise RefusedError(f"{where}: top_log_probs: got {logprobs.values[odd[0]]:g}, expected a log-probability")
    needed = sampled.logprobs.spread(keep)
    if bool((logprobs.lengths[needed] == 0).any()):
        raise RefusedError(
            "--estimator otb needs Σπ² of every sampled token, and these rollouts have no top_log_probs",
            hint="collect with --top-logprobs 20, or bring a column sum_pi_squared with --token-columns FILE",
        )
    return np.bincount(logprobs.owner, weights=np.exp(2 * logprobs.values.astype(np.float64)), minlength=len(logprobs))
