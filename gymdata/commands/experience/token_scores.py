"""Token columns from models: reference log-probs and entropies of a policy, values of a critic.

One number per sampled token, in turn order; rollouts that are not kept are not scored, and hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.models.scoring import Critic, PolicyModel, ToScore
from gymdata.progress import Progress
from gymdata.rollouts.sequences import RolloutSequences


@dataclass(frozen=True, slots=True)
class Scorers:
    """The models that score sampled tokens, where they are named."""

    reference: PolicyModel | None = None
    critic: Critic | None = None
    teacher: PolicyModel | None = None

    def scored(self, sequences: RolloutSequences, keep: np.ndarray, temperature: np.ndarray) -> dict[str, np.ndarray]:
        """Name → one number per sampled token; ``after`` is the value of the state after it."""
        to_score = ToScore.of(sequences, temperature)
        rows = np.flatnonzero(keep[sequences.rollout])
        selected, positions = to_score.take(rows), to_score.scores.take(rows).values
        scores: dict[str, Any] = {}
        if self.reference is not None:
            scores["ref_logprobs"], scores["entropy"] = self.reference.log_probs(selected, entropy=True)
        if self.teacher is not None:
            scores["teacher_logprobs"], _ = self.teacher.log_probs(selected)
        if self.critic is not None:
            scores["values"], scores["after"] = self.critic.values(selected)
        result = {}
        for name, values in scores.items():
            full = np.zeros(to_score.n_scored, np.float32)
            full[positions] = values
            result[name] = sequences.in_turn_order(full)
        return result


def score_tokens(
    batches: Iterator[tuple[int, RolloutSequences, pa.RecordBatch]],
    keep: np.ndarray,
    temperature: np.ndarray,
    models: Scorers,
    progress: Progress,
) -> tuple[dict[str, pa.ListArray], np.ndarray | None]:
    """(name → lists, one per rollout; the value after each rollout's last sampled token, where there is a critic) of
    ``batches`` (first row, the batch's sequences, its rows); ``keep`` and ``temperature`` have one entry per rollout of all.
    Raises RefusedError for ids that a model cannot read."""
    lists: dict[str, list[pa.ListArray]] = {}
    after = None if models.critic is None else np.zeros(len(keep))
    progress.update(done=0, total=len(keep))
    for row, sequences, batch in batches:
        here = slice(row, row + batch.num_rows)
        by_rollout = sequences.sampled.logprobs
        for name, values in models.scored(sequences, keep[here], temperature[here]).items():
            if name == "after":
                assert after is not None
                filled = by_rollout.lengths > 0
                after[here][filled] = values[by_rollout.offsets[1:][filled] - 1]
            else:
                lists.setdefault(name, []).append(by_rollout.like(values).to_arrow())
        progress.update(done=here.stop, total=len(keep))
    return {name: pa.concat_arrays(parts) for name, parts in lists.items()}, after
