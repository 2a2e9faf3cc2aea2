"""What must not be trained, told before a trainer starts: ids, tokenizers and log-probabilities that mean something else.

Invariants: a check reads the data and the run.json files behind it, never the model's weights; each refusal names
its code and what to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gymdata.engines.model_facts import ModelFacts, check_tokenizer
from gymdata.errors import RefusedError
from gymdata.progress import Progress
from gymdata.rollouts.logprobs import sampling_biases, truncations
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
from gymdata.train.data import TrainingData
from gymdata.train.data_experiences import TrainingExperiences
from gymdata.train.settings import TrainConfig, TrainDpoConfig, TrainRlConfig


def check(
    config: TrainConfig,
    data: TrainingData,
    runs: list[dict[str, Any]],
    model: ModelFacts,
    source: str,
    progress: Progress,
) -> None:
    """Every check of a trainer's data. Raises DataError or RefusedError; ``progress`` hears the warnings."""
    data.cost.refuse(source, model.path, model.max_length)
    check_vocabulary(data.sequences.token_ids.values, model, source)
    check_tokenizer(runs, model, source, progress)
    if isinstance(config, TrainDpoConfig) and config.ref == "saved":
        _check_reference(source, runs, model)
    if isinstance(config, TrainRlConfig) and isinstance(data, TrainingExperiences):
        _check_logprobs(data, runs, source, config.allow_biased_logprobs, progress)


def check_vocabulary(ids: np.ndarray, model: ModelFacts, source: str) -> None:
    """Raises RefusedError (T206) for an id that the model has no embedding of."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (model.vocab_size is not None and high >= model.vocab_size):
        raise RefusedError(
            f"{source}: token id {low if low < 0 else high} is not in the vocabulary of {model.path} "
            f"(0 to {model.vocab_size})",
            code="T206",
            hint="these tokens were sampled with another tokenizer",
        )


def _check_reference(source: str, runs: list[dict[str, Any]], model: ModelFacts) -> None:
    """``ref: saved`` needs the sampler's log-probabilities to be the model's own, over its whole distribution."""
    rows = read_table(source, PAIRS, columns=["policy_hash", "temperature"])
    reasons = [
        f"policy {p}, not {model.policy_hash}" for p in set(rows["policy_hash"].to_pylist()) - {model.policy_hash}
    ]
    reasons += [f"temperature {t:g}, not 1" for t in set(rows["temperature"].to_pylist()) - {1.0}]
    identities = [identity for run in runs if (identity := run.get("identity"))]
    if not identities:
        reasons.append("no run.json says how they were sampled")
    for identity in identities:
        reasons += truncations(identity)
    if reasons:
        raise RefusedError(
            f"{source}: the saved log-probabilities are not the reference's: {'; '.join(sorted(set(reasons)))}",
            code="L304",
            hint="--ref model computes the reference with the model",
        )


def _check_logprobs(
    data: TrainingExperiences, runs: list[dict[str, Any]], source: str, allowed: bool, progress: Progress
) -> None:
    """The ratio to the sampler means something only when the saved log-probabilities are of what it sampled from."""
    identities = [identity for run in runs if (identity := run.get("identity"))]
    temperatures = set(data.temperature.tolist())
    reasons = [reason for identity in identities or [{}] for reason in sampling_biases(identity, temperatures)]
    if not identities:
        progress.message(
            f"warning: {source} does not lead back to a run: how its log-probabilities were made is not known"
        )
    if not reasons:
        return
    why = "; ".join(sorted(set(reasons)))
    if not allowed:
        raise RefusedError(
            f"{source}: the saved log-probabilities are biased: {why}",
            code="L304",
            hint="collect with processed log-probs, top_p 1, top_k 0, min_p 0 and no penalties; "
            "--allow-biased-logprobs trains all the same",
        )
    progress.message(f"warning: {source}: training on biased log-probabilities (L304): {why}")
