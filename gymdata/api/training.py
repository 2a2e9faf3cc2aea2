"""``train_dpo``, ``train_rl``, ``train_sft``: join the training stages to the trainer process and to what a model is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.config.train import TrainDpoConfig, TrainRlConfig, TrainSftConfig
from gymdata.core.schema import EXPERIENCES, PAIRS, ROLLOUTS
from gymdata.errors import DataError, UsageError
from gymdata.ports import Progress
from gymdata.store import resolve


def train_dpo(
    pairs: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = ("gymdata.train_dpo",),
) -> dict[str, Any]:
    """Train ``model`` with DPO on the saved ids and masks of ``pairs`` and save it to ``output``.

    ``settings``: keys of TrainDpoConfig and of TRL's DPOConfig and ModelConfig (``{"learning_rate": 1e-5,
    "use_peft": True}``); they beat the YAML file ``config`` and are beaten by ``sets`` (``"key=value"``).
    Returns the content of ``output``/run.json: ``trained_tokens`` (the proof), counts, settings, versions, parents.
    Raises RefusedError with a code when the pairs must not be trained on, and OutsideError("trainer").
    """
    from gymdata.adapters.trainers.launch import run_job
    from gymdata.stages import train

    resolve(pairs, PAIRS)  # a missing file is told at once
    given = {**(settings or {}), "model": model and str(model), "output": output and str(output)}
    resolved = TrainDpoConfig.load(config, given, list(sets))
    return train.train_dpo(
        pairs,
        resolved,
        model_facts(resolved.model),
        run_job,
        progress or _Silent(),
        command=list(command),
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
    )


def train_rl(
    experiences: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = ("gymdata.train_rl",),
) -> dict[str, Any]:
    """Train ``model`` on the saved advantages and log-probs of ``experiences`` and save it to ``output``.

    ``settings``: keys of TrainRlConfig, of transformers' TrainingArguments and of TRL's ModelConfig; precedence as in
    ``train_dpo``. Returns the content of ``output``/run.json, ``ratio`` (how far the model was from the sampler before the
    first step) among it. Raises RefusedError with a code when the file must not be trained on, and OutsideError("trainer").
    """
    from gymdata.adapters.trainers.launch import run_job
    from gymdata.stages import train_rl as stage

    resolve(experiences, EXPERIENCES)  # a missing file is told at once
    given = {**(settings or {}), "model": model and str(model), "output": output and str(output)}
    resolved = TrainRlConfig.load(config, given, list(sets))
    return stage.train_rl(
        experiences,
        resolved,
        model_facts(resolved.model),
        run_job,
        progress or _Silent(),
        command=list(command),
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
    )


def train_sft(
    rollouts: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = ("gymdata.train_sft",),
) -> dict[str, Any]:
    """Train ``model`` on the exact tokens of the rollouts that their rewards choose, and save it to ``output``.

    ``settings``: keys of TrainSftConfig, of transformers' TrainingArguments and of TRL's ModelConfig; precedence as in
    ``train_dpo``. Returns the content of ``output``/run.json. Raises RefusedError with a code when the rollouts must not be
    trained on, and OutsideError("trainer").
    """
    from gymdata.adapters.trainers.launch import run_job
    from gymdata.stages import train_sft as stage

    resolve(rollouts, ROLLOUTS)  # a missing file is told at once
    given = {**(settings or {}), "model": model and str(model), "output": output and str(output)}
    resolved = TrainSftConfig.load(config, given, list(sets))
    return stage.train_sft(
        rollouts,
        resolved,
        model_facts(resolved.model),
        run_job,
        progress or _Silent(),
        command=list(command),
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
    )


def model_facts(model: str) -> Any:
    """What the training stage must know of a model folder. Raises DataError when there is no such model."""
    from gymdata.adapters.engines import weights
    from gymdata.stages.train import ModelFacts

    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise UsageError.missing_extra("transformers", "train") from error
    policy = weights.model_facts(model)
    folder = weights.tokenizer_folder(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError.unreadable(folder, f"no tokenizer there ({str(error).splitlines()[0]})") from error
    tokens = weights.tokenizer_facts(tokenizer, tokenizer.chat_template)
    limits = _limits(Path(policy["base"] or model))
    return ModelFacts(
        path=model,
        policy_hash=policy["policy_hash"],
        tokenizer_hash=tokens["tokenizer_hash"],
        chat_template_hash=tokens["chat_template_hash"],
        vocab_size=limits.get("vocab_size"),
        max_length=limits.get("max_position_embeddings"),
    )


def _limits(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return config.get("text_config") or config


class _Silent:
    """Progress that nobody watches."""

    def update(self, **counts: float) -> None: ...

    def message(self, text: str) -> None: ...
