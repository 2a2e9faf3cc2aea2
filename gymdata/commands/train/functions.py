"""``train_sft``, ``train_dpo`` and the others: the public functions of the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymdata.commands.train.run import TrainReport, train
from gymdata.commands.train.settings import (
    TrainConfig,
    TrainDpoConfig,
    TrainKtoConfig,
    TrainRewardConfig,
    TrainRlConfig,
    TrainSftConfig,
    TrainValueConfig,
)
from gymdata.progress import Progress
from gymdata.public import path_of
from gymdata.settings import Settings
from gymdata.store import resolve


def train_sft(
    rollouts: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: TrainSftConfig | str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Train ``model`` on the exact tokens of the rollouts that their rewards choose, and save it to ``output``.

    Settings are those of ``TrainSftConfig`` and of transformers' TrainingArguments. A training that is there is
    resumed from its last checkpoint, ``overwrite`` starts again, ``dry_run`` checks the data and proves the batches only.
    """
    settings |= {"model": model, "output": output}
    return _trained(TrainSftConfig, rollouts, config, settings, overwrite=overwrite, dry_run=dry_run, progress=progress)


def train_dpo(
    pairs: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: TrainDpoConfig | str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Train ``model`` with DPO on the saved ids and masks of ``pairs``, and save it to ``output``.

    Settings are those of ``TrainDpoConfig`` and of TRL's DPOConfig. A training that is there is
    resumed from its last checkpoint, ``overwrite`` starts again, ``dry_run`` checks the data and proves the batches only.
    """
    settings |= {"model": model, "output": output}
    return _trained(TrainDpoConfig, pairs, config, settings, overwrite=overwrite, dry_run=dry_run, progress=progress)


def train_kto(
    rollouts: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: TrainKtoConfig | str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Train ``model`` with KTO on the exact tokens of rollouts, each desirable or not by its reward, and save it to
    ``output``.

    Settings are those of ``TrainKtoConfig`` and of TRL's KTOConfig. A training that is there is
    resumed from its last checkpoint, ``overwrite`` starts again, ``dry_run`` checks the data and proves the batches only.
    """
    settings |= {"model": model, "output": output}
    return _trained(TrainKtoConfig, rollouts, config, settings, overwrite=overwrite, dry_run=dry_run, progress=progress)


def train_reward(
    pairs: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: TrainRewardConfig | str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Train a reward model from ``model`` on the saved ids of ``pairs`` (``heldout`` of the result: how it ranks pairs of
    other tasks), and save it to ``output``.

    Settings are those of ``TrainRewardConfig`` and of TRL's RewardConfig. A training that is there is
    resumed from its last checkpoint, ``overwrite`` starts again, ``dry_run`` checks the data and proves the batches only.
    """
    settings |= {"model": model, "output": output}
    return _trained(TrainRewardConfig, pairs, config, settings, overwrite=overwrite, dry_run=dry_run, progress=progress)


def train_value(
    experiences: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: TrainValueConfig | str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Train a critic, which ``gymdata.experience(critic=…)`` reads, from ``model`` on the saved returns of
    ``experiences`` (``heldout`` of the result: the variance of returns of other tasks that it explains, before and after),
    and save it to ``output``.

    Settings are those of ``TrainValueConfig`` and of transformers' TrainingArguments. A training that is there is
    resumed from its last checkpoint, ``overwrite`` starts again, ``dry_run`` checks the data and proves the batches only.
    """
    settings |= {"model": model, "output": output}
    return _trained(
        TrainValueConfig, experiences, config, settings, overwrite=overwrite, dry_run=dry_run, progress=progress
    )


def train_rl(
    experiences: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    config: TrainRlConfig | str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Train ``model`` on the saved advantages and log-probs of ``experiences`` (``ratio`` of the result: how far the
    model was from the sampler before the first step), and save it to ``output``.

    Settings are those of ``TrainRlConfig`` and of transformers' TrainingArguments. A training that is there is
    resumed from its last checkpoint, ``overwrite`` starts again, ``dry_run`` checks the data and proves the batches only.
    """
    settings |= {"model": model, "output": output}
    return _trained(
        TrainRlConfig, experiences, config, settings, overwrite=overwrite, dry_run=dry_run, progress=progress
    )


def _trained(
    kind: type[TrainConfig],
    source: str | Path,
    config: TrainConfig | str | Path | None,
    given: Settings,
    **how: Any,
) -> TrainReport:
    source = path_of(source, f"train_{kind.algorithm}")
    resolve(source, kind.table)  # reports a missing path first
    if isinstance(config, TrainConfig):
        given, config = (
            {**config.model_dump(exclude_unset=True), **{k: v for k, v in given.items() if v is not None}},
            None,
        )
    given |= {key: value and str(value) for key, value in given.items() if key in ("model", "output")}
    return train(source, kind.load(None if config is None else Path(config), given), **how)
