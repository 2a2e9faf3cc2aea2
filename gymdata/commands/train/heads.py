"""The sampler's heads of an experiences file, as trainers read them: k ids and log-probs for each trained token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from gymdata.commands.train.mapped import chunks
from gymdata.commands.train.sequence_data import TrainingExperiences
from gymdata.errors import RefusedError, UsageError
from gymdata.rollouts.kept_sets import KeptSets
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.schema import EXPERIENCES, HEAD, HEADED_ROWS
from gymdata.store import scan_batches
from gymdata.store.paths import RunFacts

#: The most ids of a token that a loss reads.
MOST_TOP_IDS = 64


def only_cuts(runs: Sequence[RunFacts], temperatures: Sequence[float] | None = None) -> bool:
    """Whether what these runs' sampling changed is that ids were left out, and nothing else."""
    identities = [identity for run in runs if (identity := run.get("identity"))]
    biased = any(sampling_biases(identity, temperatures) for identity in identities)
    return biased and not any(sampling_biases(identity, temperatures, kept_sets=True) for identity in identities)


def ids_per_token(source: str) -> int:
    """The most ids in a head of an experiences file; 0 without any. Raises RefusedError for more than ``MOST_TOP_IDS``."""
    most = 0
    for batch in scan_batches(source, EXPERIENCES, (HEAD[0],), HEADED_ROWS):
        if HEAD[0] in batch.schema.names:
            most = max(most, pc.max(pc.list_value_length(batch.column(0).flatten())).as_py() or 0)
    if most > MOST_TOP_IDS:
        raise RefusedError(
            f"{source}: {HEAD[0]} has {most:,} ids of one token, expected at most {MOST_TOP_IDS}",
            hint="leave the least likely ids of each token out",
        )
    return most


def require_heads(k: int, source: str) -> None:
    """Raises UsageError for a file without a single head."""
    if not k:
        raise UsageError(
            f"--score-centering reads the sampler's head of each token, and {source} has no {HEAD[0]}",
            hint="`gymdata collect … --top-logprobs 20` saves it, and `gymdata experience` writes it",
        )


def has_kept_sets(data: TrainingExperiences, runs: Sequence[RunFacts]) -> bool:
    """Whether ids were left out when the file was sampled, and each head is all that could be sampled: the model is then
    normalized over it."""
    if data.top_ids is None or data.top_log_probs is None or not only_cuts(runs, data.temperature.tolist()):
        return False
    kept = KeptSets()
    for rows in chunks(data.top_ids.offsets):
        ids, logprobs = data.top_ids.part(rows).values, data.top_log_probs.part(rows).values
        there, tokens = ids >= 0, data.sequences.token_ids.part(rows)
        sampled = tokens.values[data.sequences.loss_mask.part(rows).values != 0]
        lists = Ragged(ids[there], np.concatenate(([0], np.cumsum(there.sum(axis=1)))))
        kept.count(lists, lists.like(logprobs[there]), sampled)
    return kept.all_kept


def extent(top_ids: Ragged) -> np.ndarray:
    """The lowest and the highest id of all heads; 0 where there is none."""
    lowest = highest = 0
    for rows in chunks(top_ids.offsets):
        ids = top_ids.part(rows).values
        highest = max(highest, int(ids.max(initial=0)))
        lowest = min(lowest, int(ids[ids != -1].min(initial=0)))
    return np.array([lowest, highest])
