"""The sampler's heads of an experiences file, as trainers read them: k ids and log-probs for each trained token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from gymdata.commands.train.data import MASK, TrainingData, lists_of
from gymdata.commands.train.token_checksum import IDS
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.rollouts.heads import of_another_token
from gymdata.rollouts.kept_sets import KeptSets
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.ragged import Array, Ragged, offsets_of
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


def has_kept_sets(data: TrainingData, runs: Sequence[RunFacts]) -> bool:
    """Whether ids were left out when the file was sampled, and each head is all that could be sampled: the model is then
    normalized over it."""
    if not data.head_ids or not only_cuts(runs, list(data.facts.temperatures)):
        return False
    kept = KeptSets()
    for heads in _heads(data):
        kept.count(heads.ids, heads.logprobs, heads.sampled)
    return kept.all_kept


def head_warnings(data: TrainingData) -> Iterator[str]:
    """How many trained tokens have no head, and how many that of another token, as their saved log-probs say."""
    tokens = headed = others = row = 0
    first = ""
    for heads in _heads(data):
        wrong = of_another_token(heads.ids, heads.logprobs, heads.sampled, heads.saved)
        if wrong.any() and not first:
            first = data.name(row + int(np.searchsorted(np.cumsum(heads.of_rows), int(wrong.argmax()), side="right")))
        row, tokens, others = row + len(heads.of_rows), tokens + len(wrong), others + int(wrong.sum())
        headed += int((heads.ids.lengths > 0).sum())
    if headed < tokens:
        yield f"{tokens - headed:,} of {counted(tokens, 'trained token')} have no head of the sampler"
    if others:
        log_prob = "have another log-probability of the sampled id than is saved"
        yield f"{others:,} of {headed:,} heads {log_prob} (first: {first}): were they saved at other tokens?"


class _Heads(NamedTuple):
    """The heads of a batch's trained tokens, their ids, their log-probs, and how many each row has."""

    ids: Ragged
    logprobs: Ragged
    sampled: Array
    saved: Array
    of_rows: Array


def _heads(data: TrainingData) -> Iterator[_Heads]:
    """Those of each batch; ``saved`` is NaN where the data has no log-probs, as that to distill."""
    has_saved = "logprobs" in data.table.column_names
    for batch in data.batches(IDS, MASK, *HEAD, *["logprobs"] * has_saved):
        tokens, masks, ids, logprobs = (lists_of(batch[name]) for name in (IDS, MASK, *HEAD))
        trained, there = masks.values != 0, ids.values >= 0
        sampled = tokens.values[trained]
        n_ids = there.reshape(len(sampled), data.head_ids).sum(axis=1)
        lists = Ragged(ids.values[there], offsets_of(n_ids))
        saved = lists_of(batch["logprobs"]).values[trained] if has_saved else np.full(len(sampled), np.nan)
        yield _Heads(lists, lists.like(logprobs.values[there]), sampled, saved, masks.sums(trained))
