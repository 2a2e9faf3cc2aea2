"""Batch RL from saved experiences: what is refused and announced before a trainer starts.

What always holds: a file whose saved log-probabilities are not of the distribution that was sampled from is refused
(L304) unless that was asked for; the rest is the frame of ``gymdata.stages.train``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymdata
from gymdata.config.train import TrainRlConfig
from gymdata.core.schema import EXPERIENCES
from gymdata.core.training_experiences import (
    EXPERIENCE_COLUMNS,
    LengthCost,
    TrainingExperiences,
    training_experiences,
)
from gymdata.errors import DataError, RefusedError
from gymdata.ports import Progress
from gymdata.stages.train import (
    ModelFacts,
    Runner,
    absolute,
    check_tokenizer,
    check_vocabulary,
    lineage,
    parent_of,
    run_training,
    truncations,
)
from gymdata.store import read_table

_LOSS = ("loss", "clip_low", "clip_high", "cispo_low", "cispo_high", "tis_cap", "kl_beta")


def train_rl(
    experiences: str | Path,
    config: TrainRlConfig,
    model: ModelFacts,
    run_job: Runner,
    progress: Progress,
    *,
    command: list[str],
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train ``config.model`` on an experiences file; returns run.json's content (of a dry run: what it would begin).

    ``ratio`` in it: how far the model was from the sampler before the first step. Raises DataError, RefusedError (with the
    code), UsageError, StoreError, or OutsideError("trainer").
    """
    source = str(experiences)
    data = training_experiences(read_table(source, EXPERIENCES, columns=EXPERIENCE_COLUMNS), config.max_length, source)
    runs = list(lineage(source))
    check_lengths(data.cost, len(data), model, source)
    check_vocabulary(data.sequences.ids, model, source)
    check_tokenizer(runs, model, source, progress)
    _check_logprobs(data, runs, source, config.allow_biased_logprobs, progress)
    announce(data.cost, progress)
    expected = data.sequences.trained()
    out = config.output.resolve()
    job = {
        "trainer": "rl",
        "data": absolute(source),
        "model": absolute(config.model),
        "policy_hash": model.policy_hash,
        "output": str(out),
        "max_length": config.max_length,
        "loss": {name: getattr(config, name) for name in _LOSS},
        "on_policy": data.policy_hashes == {model.policy_hash},
        "allow_biased_logprobs": config.allow_biased_logprobs,
        "settings": config.trainer,
        "trained_tokens": expected.as_json(),
        "num_processes": config.num_processes,
        "own_keys": sorted(type(config).model_fields),
        "resume": resume,
        "dry_run": dry_run,
    }
    begun = {
        "stage": "train-rl",
        "version": gymdata.__version__,
        "command": command,
        "config": config.model_dump(mode="json"),
        "parents": [parent_of(source)],
        "model": vars(model),
        "counts": {"sequences": len(data), "trained_tokens": expected.count},
        "length_limit": data.cost.as_json(),
    }
    del data
    return run_training(out, job, begun, run_job, progress, resume=resume, overwrite=overwrite, dry_run=dry_run)


def check_lengths(cost: LengthCost, left: int, model: ModelFacts, source: str) -> None:
    """Raises DataError or RefusedError when nothing is left to train or the model cannot read the longest sequence."""
    if cost.sequences == 0:
        raise DataError.empty(source, "sequences to train on")
    if left == 0:
        why = f"with --max-length {cost.max_length} " if cost.max_length else ""
        raise RefusedError(
            f"{source}: {why}none of {cost.sequences:,} sequences has a trained token left",
            code="T205",
            hint="give a --max-length that reaches beyond the prompts" if cost.max_length else None,
        )
    limit, effective = model.max_length, min(cost.longest, cost.max_length or cost.longest)
    if limit is not None and effective > limit:
        raise RefusedError(
            f"{source}: the longest sequence has {effective:,} tokens, {model.path} reads at most {limit:,}",
            hint=f"--max-length {limit} cuts longer ones and prints what that costs; --dry-run prints it without training",
        )


def announce(cost: LengthCost, progress: Progress) -> None:
    """Say what a length limit costs."""
    if cost.sequences_cut or cost.nothing_trained:
        progress.message(
            f"{cost.sequences_cut:,} of {cost.sequences:,} sequences are cut, {len(cost.nothing_trained):,} left out "
            f"because no trained token remains; {cost.trained_tokens_lost:,} trained tokens lost in all"
        )


def _check_logprobs(
    data: TrainingExperiences, runs: list[dict[str, Any]], source: str, allowed: bool, progress: Progress
) -> None:
    """The ratio to the sampler means something only when the saved log-probabilities are of what it sampled from."""
    identities = [identity for run in runs if (identity := run.get("identity"))]
    reasons = [reason for identity in identities for reason in truncations(identity)]
    temperatures = sorted(set(data.temperature.tolist()))
    if temperatures[0] == 0:
        reasons.append("greedy decoding (temperature 0)")
    warm = [f"{t:g}" for t in temperatures if t not in (0.0, 1.0)]
    if warm and any(identity.get("logprobs_mode") == "raw_logprobs" for identity in identities):
        reasons.append(f"raw log-probabilities at temperature {', '.join(warm)}")
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
