"""The checks of training data that need the whole file, or the runs behind it; the model's weights are not read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.commands.train.data import MASK, TrainingData, lists_of
from gymdata.commands.train.heads import has_kept_sets, head_warnings
from gymdata.commands.train.losses import LOSSES
from gymdata.commands.train.parts import distinct
from gymdata.commands.train.settings import (
    TrainConfig,
    TrainDpoConfig,
    TrainRlConfig,
    TrainSftConfig,
    TrainValueConfig,
)
from gymdata.commands.train.token_checksum import IDS
from gymdata.credit.estimators import ALL
from gymdata.errors import DataError, RefusedError, UsageError, abridged, counted
from gymdata.models.model_identity import ModelFacts, check_tokenizer, no_run_names
from gymdata.models.scoring import refuse_unknown_ids
from gymdata.progress import Progress
from gymdata.rollouts.logprobs import SampledLogProbs, sampling_biases, truncations
from gymdata.rollouts.schema import HEAD, PAIRS
from gymdata.store.paths import RunFacts


def check(
    config: TrainConfig, data: TrainingData, runs: list[RunFacts], model: ModelFacts, source: str, progress: Progress
) -> None:
    """Every check of a trainer's data. Raises DataError or RefusedError; ``progress`` gets the warnings."""
    data.facts.cost.refuse(source, model.path, model.max_length)
    refuse_unknown_ids(_extent(data, IDS), model.vocab_size, model.path, f"{source}: ")
    if data.head_ids:
        refuse_unknown_ids(_extent(data, HEAD[0]), model.vocab_size, model.path, f"{source}: {HEAD[0]}: ")
        for why in head_warnings(data):
            progress.message(f"warning: {source}: {why}")
    check_tokenizer(runs, model, source, progress)
    if isinstance(config, TrainDpoConfig) and config.ref == "saved":
        _check_reference(source, runs, model, data)
    if isinstance(config, TrainRlConfig):
        # The ratio to the sampler means something only when the saved log-probabilities are of what it sampled from.
        why = _sampling_faults(data, runs, source, "its log-probabilities were", progress)
        if why and has_kept_sets(data, runs):
            progress.message(
                f"{source}: {why}: the model is normalized over the kept set of each token, its saved head"
            )
            why = ""
        code, hint = "L304", "collect with processed log-probs, top_p 1, top_k 0, min_p 0 and no penalties"
        if not why and (why := _impossible(data)):
            code, hint = "L306", "train-sft, train-dpo and train-kto need no log-probabilities"
        if why and not config.allow_biased_logprobs:
            raise RefusedError(
                f"{source}: the saved log-probabilities are biased: {why}",
                code=code,
                hint=f"{hint}; --allow-biased-logprobs trains all the same",
            )
        if why:
            progress.message(f"warning: {source}: training on biased log-probabilities ({code}): {why}")
    if isinstance(config, TrainSftConfig) and config.distill:
        if why := _sampling_faults(data, runs, source, "its top_log_probs were", progress):
            raise RefusedError(
                f"{source}: the saved top_log_probs are not the teacher's distribution: {why}",
                code="L304",
                hint="collect with --top-logprobs K at a temperature above 0 with processed logprobs, top_p 1, top_k 0, "
                "min_p 0 and no penalties",
            )
        if data.facts.policy_hashes == {model.policy_hash}:
            progress.message(
                f"warning: {source} was sampled by {model.path} itself: its distributions are the ones that it has, and "
                "--distill teaches it nothing; give -m the student"
            )
    if isinstance(config, TrainSftConfig) and config.pack_length is not None:
        length, lengths = config.pack_length, data.lengths
        if longer := int((lengths > length).sum()):
            rows = np.argsort(-lengths, kind="stable")[: min(longer, 4)]
            shown = ", ".join(f"{data.name(row)} ({lengths[row]:,})" for row in rows)
            shown += f" and {longer - 4:,} more" if longer > 4 else ""
            cut = f"--max-length {length} cuts them and prints what that costs"
            raise UsageError(
                f"--pack-length {length}: {longer:,} of {counted(len(lengths), 'sequence')} of {source} have more "
                f"tokens: {shown}",
                hint=f"--pack-length {lengths.max()} holds them all; {cut}",
            ).at("--pack-length", length, f"at least {lengths.max()}")
    if isinstance(config, TrainValueConfig):
        estimators = [run.get("config", {}).get("estimator") for run in runs if run.get("stage") == "experiences"]
        for estimator in sorted(name for name in estimators if name in ALL and ALL[name].compares):
            progress.message(
                f"warning: {source}: the returns were made with --estimator {estimator}, which compares the rollouts of a "
                "task: a critic learns little from them; `gymdata experience --estimator gae` keeps the rewards as they are"
            )
    _refuse_useless(data, source)
    _warn_of_nothing(config, data, source, progress)


def _extent(data: TrainingData, name: str) -> np.ndarray:
    """The lowest and the highest id of a column of lists, in which −1 is none."""
    lowest = highest = 0
    for batch in data.batches(name):
        ids = lists_of(batch[name]).values
        highest = max(highest, int(ids.max(initial=0)))
        lowest = min(lowest, int(ids[ids != -1].min(initial=0)))
    return np.array([lowest, highest])


def _refuse_useless(data: TrainingData, source: str) -> None:
    """Raises DataError for a margin that is not known, and RefusedError for weights that are all 0."""
    for name in {"margin", "reward_margin"}.intersection(data.read_by_loss):
        if (unknown := np.isnan(data.numbers(name))).any():
            raise DataError(
                f"{source}: {counted(int(unknown.sum()), 'pair has', 'pairs have')} no margin, which this loss reads "
                f"(first: {data.table['name'][int(unknown.argmax())]})",
                hint="give the pairs a margin, or choose a loss without one",
            )
    if "weight" in data.read_by_loss and not data.numbers("weight").any():
        raise RefusedError(
            f"{source}: weight is 0 in every row: nothing would be learned", hint="leave the column at 1"
        )


def _warn_of_nothing(config: TrainConfig, data: TrainingData, source: str, progress: Progress) -> None:
    """Warn of settings and data with which nothing would be trained."""
    keys = config.trainer
    if keys.get("num_train_epochs") == 0 and (keys.get("max_steps") or 0) <= 0:
        progress.message("warning: num_train_epochs is 0: nothing is trained, and the model is saved as it was")
    if keys.get("learning_rate") == 0:
        progress.message("warning: learning_rate is 0: no step changes the model")
    if tied := data.counts.get("groups_of_equal_rewards"):
        progress.message(
            f"{source}: in {tied:,} of {counted(data.counts['rollouts_chosen'], 'chosen group')} all rewards are equal: the "
            "first rollout of each is trained (--select above trains them all, --min-reward leaves failures out)"
        )
    loss = LOSSES.get(config.loss) if isinstance(config, TrainRlConfig) else None
    if loss is not None and not loss.at_zero:
        if any(
            lists_of(b["advantages"]).values[lists_of(b[MASK]).values != 0].any()
            for b in data.batches(MASK, "advantages")
        ):
            return
        progress.message(
            f"warning: {source}: the advantage of every trained token is 0, with which the loss is 0: nothing is learned "
            "from the rewards. Rollouts of a task that all have the same reward have no advantage (`gymdata experience "
            "--zero-variance keep` writes them): collect more rollouts per task, or tasks that are sometimes solved"
        )


def _check_reference(source: str, runs: list[RunFacts], model: ModelFacts, data: TrainingData) -> None:
    """``ref: saved`` needs the sampler's log-probabilities to be the model's own, over its whole distribution."""
    rendered, policies, temperatures = (
        distinct(source, PAIRS, name) for name in ("rendered", "policy_hash", "temperature")
    )
    reasons = ["ids rendered from text have no log-probabilities (T213)"] if True in rendered else []
    if not reasons and any(np.isnan(logprobs).any() for logprobs, *_ in _trained_logprobs(data)):
        reasons.append("some are not known (L302)")
    reasons += [f"policy {p}, not {model.policy_hash}" for p in policies - {model.policy_hash}]
    reasons += [f"temperature {t:g}, not 1" for t in temperatures - {1.0}]
    reasons += [f"{why} (L306)"] if (why := _impossible(data)) else []
    identities = [identity for run in runs if (identity := run.get("identity"))]
    if not identities:
        reasons.append("nothing beside them says how they were sampled")
    for identity in identities:
        reasons += truncations(identity)
    if reasons:
        raise RefusedError(
            f"{source}: the saved log-probabilities are not the reference's: {abridged(sorted(set(reasons)))}",
            code="L304",
            hint="--ref model computes the reference with the model",
        )


def _impossible(data: TrainingData) -> str:
    """L306: why the saved log-probabilities of trained tokens cannot be a sampler's, or nothing."""
    counts = SampledLogProbs()
    for trained in _trained_logprobs(data):
        counts.add(*trained)
    return counts.fault()


def _trained_logprobs(data: TrainingData) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The saved log-probabilities of trained tokens, which of these follow another, how many a sequence has; in parts."""
    for batch in data.batches(MASK, "logprobs"):
        masks = lists_of(batch[MASK])
        trained = masks.values != 0
        yield lists_of(batch["logprobs"]).values[trained], np.roll(trained, 1)[trained], masks.sums(trained)


def _sampling_faults(data: TrainingData, runs: list[RunFacts], source: str, what: str, progress: Progress) -> str:
    """Why the saved log-probabilities are not those of the whole distribution at the temperature of their rows, or nothing;
    warns where no run says how they were made."""
    identities = [identity for run in runs if (identity := run.get("identity"))]
    if not identities:
        progress.message(f"warning: {source}: {no_run_names(runs, 'sampling settings')}: how {what} made is not known")
    temperatures = data.facts.temperatures
    reasons = {reason for identity in identities or [{}] for reason in sampling_biases(identity, temperatures)}
    return "; ".join(sorted(reasons))
