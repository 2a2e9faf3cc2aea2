"""``train_dpo``, ``train_kto`` and the others: join the training stage to the trainer process and to what a model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError
from gymdata.progress import NullProgress, Progress
from gymdata.public import path_of
from gymdata.rollouts.schema import TABLES
from gymdata.store import has_rows, resolve
from gymdata.train.settings import (
    TRAINERS,
    TrainConfig,
    TrainDpoConfig,
    TrainKtoConfig,
    TrainRewardConfig,
    TrainRlConfig,
    TrainSftConfig,
)
from gymdata.train.trainer_settings import check_settings

if TYPE_CHECKING:
    from gymdata.rollouts.schema import Table
from gymdata.engines.model_facts import model_facts


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
) -> dict[str, Any]:
    """Train ``model`` with DPO on the saved ids and masks of ``pairs`` and save it to ``output``.

    Settings are those of ``TrainDpoConfig`` and of TRL's DPOConfig; see ``train`` for the rest.
    """
    return _trained("dpo", pairs, model, output, config, settings, overwrite, dry_run, progress)


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
) -> dict[str, Any]:
    """Train ``model`` with KTO on the exact tokens of rollouts, each desirable or not by its reward, and save it to
    ``output``. Settings are those of ``TrainKtoConfig`` and of TRL's KTOConfig; see ``train`` for the rest."""
    return _trained("kto", rollouts, model, output, config, settings, overwrite, dry_run, progress)


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
) -> dict[str, Any]:
    """Train a reward model from ``model`` on the saved ids of ``pairs`` and save it to ``output``.

    Settings are those of ``TrainRewardConfig`` and of TRL's RewardConfig; see ``train`` for the rest. ``heldout`` in what
    is returned: how it ranks pairs of other tasks.
    """
    return _trained("reward", pairs, model, output, config, settings, overwrite, dry_run, progress)


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
) -> dict[str, Any]:
    """Train ``model`` on the saved advantages and log-probs of ``experiences`` and save it to ``output``.

    Settings are those of ``TrainRlConfig`` and of transformers' TrainingArguments; see ``train`` for the rest. ``ratio`` in
    what is returned: how far the model was from the sampler before the first step.
    """
    return _trained("rl", experiences, model, output, config, settings, overwrite, dry_run, progress)


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
) -> dict[str, Any]:
    """Train ``model`` on the exact tokens of the rollouts that their rewards choose, and save it to ``output``. Settings
    are those of ``TrainSftConfig`` and of transformers' TrainingArguments; see ``train`` for the rest."""
    return _trained("sft", rollouts, model, output, config, settings, overwrite, dry_run, progress)


def _trained(
    algorithm: str,
    source: str | Path,
    model: str | Path | None,
    output: str | Path | None,
    config: TrainConfig | str | Path | None,
    settings: Mapping[str, Any],
    overwrite: bool,
    dry_run: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    path_of(source, f"train_{algorithm}")
    if isinstance(config, TrainConfig):
        settings, config = {**config.model_dump(exclude_unset=True), **settings}, None
    given = {**settings, "model": model and str(model), "output": output and str(output)}
    resolved = TRAINERS[algorithm].load(None if config is None else Path(config), given)
    return train(source, resolved, overwrite=overwrite, dry_run=dry_run, progress=progress)


def train(
    source: str | Path,
    settings: TrainConfig,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Train with any of ``gymdata.train.settings.TRAINERS``.

    ``settings.trainer`` has keys of the library's arguments and of TRL's ModelConfig (``{"learning_rate": 1e-5,
    "use_peft": True}``). A training that is there is resumed from its last checkpoint, ``overwrite`` starts again,
    ``dry_run`` checks and proves the batches only.

    Returns the content of ``output``/run.json: ``trained_tokens`` (the proof), counts, settings, versions, parents.
    Raises RefusedError with a code when the data must not be trained on, and OutsideError("trainer").
    """
    from gymdata.train.launch_checks import train_resolved
    from gymdata.train.trainers.launch import run_job

    _refuse_no_rows(source, settings.table)  # and a missing file, before torch is loaded
    check_settings(settings.algorithm, settings.trainer, own=type(settings).model_fields)
    return train_resolved(
        source,
        settings,
        model_facts(settings.model),
        run_job,
        progress or NullProgress(),
        command=list(command) or [f"gymdata.train_{settings.algorithm}"],
        overwrite=overwrite,
        dry_run=dry_run,
    )


def _refuse_no_rows(source: str | Path, table: Table) -> None:
    files = resolve(source, table)
    if not files:
        held = next((name for name in TABLES if name != table.name and resolve(source, name)), None)
        if held is not None:
            readers = [f"train-{name}" for name, kind in TRAINERS.items() if kind.table.name == held]
            raise DataError.other_table(source, held, table.name, readers)
    if not any(has_rows(file, table) for file in files):
        raise DataError.nothing_to_train([file.path for file in files] or [Path(source)], table.name)
