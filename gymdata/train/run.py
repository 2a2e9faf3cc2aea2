"""``train_dpo``, ``train_kto`` and the others: join the training stage to the trainer process and to what a model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gymdata.errors import DataError
from gymdata.progress import Progress
from gymdata.rollouts.schema import TABLES
from gymdata.store import has_rows, resolve
from gymdata.store.lineage import Unwatched
from gymdata.train.settings import TRAINERS
from gymdata.train.trainer_settings import check_settings

if TYPE_CHECKING:
    from gymdata.rollouts.schema import Table
from gymdata.engines.model_facts import model_facts


class TrainOptions(TypedDict, total=False):
    """What every ``train_…`` function takes besides file, model and output.

    ``settings``: keys of the trainer's config class (``gymdata.train.settings``), of the library's arguments and of TRL's
    ModelConfig (``{"learning_rate": 1e-5, "use_peft": True}``); they beat the YAML file ``config`` and are beaten by
    ``sets`` (``"key=value"``). A training that is there is resumed from its last checkpoint, ``overwrite`` starts again,
    ``dry_run`` checks and proves the batches only.
    """

    config: Path | None
    settings: Mapping[str, Any] | None
    sets: Sequence[str]
    overwrite: bool
    dry_run: bool
    progress: Progress | None
    command: Sequence[str]


_Place = str | Path | None


def train_dpo(
    pairs: str | Path, model: _Place = None, output: _Place = None, **options: Unpack[TrainOptions]
) -> dict[str, Any]:
    """Train ``model`` with DPO on the saved ids and masks of ``pairs`` and save it to ``output``; see ``train``.

    Other settings are those of TRL's DPOConfig.
    """
    return train("dpo", pairs, model, output, **options)


def train_kto(
    rollouts: str | Path, model: _Place = None, output: _Place = None, **options: Unpack[TrainOptions]
) -> dict[str, Any]:
    """Train ``model`` with KTO on the exact tokens of rollouts, each desirable or not by its reward, and save it to
    ``output``; see ``train``. Other settings are those of TRL's KTOConfig."""
    return train("kto", rollouts, model, output, **options)


def train_reward(
    pairs: str | Path, model: _Place = None, output: _Place = None, **options: Unpack[TrainOptions]
) -> dict[str, Any]:
    """Train a reward model from ``model`` on the saved ids of ``pairs`` and save it to ``output``; see ``train``.

    Other settings are those of TRL's RewardConfig. ``heldout`` in what is returned: how it ranks pairs of other tasks.
    """
    return train("reward", pairs, model, output, **options)


def train_rl(
    experiences: str | Path, model: _Place = None, output: _Place = None, **options: Unpack[TrainOptions]
) -> dict[str, Any]:
    """Train ``model`` on the saved advantages and log-probs of ``experiences`` and save it to ``output``; see ``train``.

    Other settings are those of transformers' TrainingArguments. ``ratio`` in what is returned: how far the model was from
    the sampler before the first step.
    """
    return train("rl", experiences, model, output, **options)


def train_sft(
    rollouts: str | Path, model: _Place = None, output: _Place = None, **options: Unpack[TrainOptions]
) -> dict[str, Any]:
    """Train ``model`` on the exact tokens of the rollouts that their rewards choose, and save it to ``output``; see
    ``train``. Other settings are those of transformers' TrainingArguments."""
    return train("sft", rollouts, model, output, **options)


def train(
    algorithm: str,
    source: str | Path,
    model: _Place = None,
    output: _Place = None,
    *,
    config: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Train with any of ``gymdata.train.settings.TRAINERS``; the options are those of ``TrainOptions``.

    Returns the content of ``output``/run.json: ``trained_tokens`` (the proof), counts, settings, versions, parents.
    Raises RefusedError with a code when the data must not be trained on, and OutsideError("trainer").
    """
    from gymdata.train import launch_checks as stage
    from gymdata.train.trainers.launch import run_job

    kind = TRAINERS[algorithm]
    _refuse_no_rows(source, kind.table)  # and a missing file, before torch is loaded
    given = {**(settings or {}), "model": model and str(model), "output": output and str(output)}
    resolved = kind.load(config, given, list(sets))
    check_settings(algorithm, resolved.trainer, own=kind.model_fields)
    return stage.train(
        source,
        resolved,
        model_facts(resolved.model),
        run_job,
        progress or Unwatched(),
        command=list(command) or [f"gymdata.train_{algorithm}"],
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
