"""``train_dpo``, ``train_kto`` and the others: join the training stage to the trainer process and to what a model is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gymdata.api.sources import Unwatched
from gymdata.config.train import TRAINERS
from gymdata.config.trainer_settings import check_settings
from gymdata.errors import DataError, require
from gymdata.ports import Progress
from gymdata.store import has_rows, resolve

if TYPE_CHECKING:
    from gymdata.core.schema import Table


class TrainOptions(TypedDict, total=False):
    """What every ``train_…`` function takes besides file, model and output.

    ``settings``: keys of the trainer's config class (``gymdata.config.train``), of the library's arguments and of TRL's
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
    """Train with any of ``gymdata.config.train.TRAINERS``; the options are those of ``TrainOptions``.

    Returns the content of ``output``/run.json: ``trained_tokens`` (the proof), counts, settings, versions, parents.
    Raises RefusedError with a code when the data must not be trained on, and OutsideError("trainer").
    """
    from gymdata.adapters.trainers.launch import run_job
    from gymdata.stages import train as stage

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
    if not any(has_rows(file, table) for file in files):
        raise DataError.nothing_to_train([file.path for file in files] or [Path(source)], table.name)


def model_facts(model: str) -> Any:
    """What the training stage must know of a model folder. Raises DataError when there is no such model."""
    from gymdata.adapters.engines import weights
    from gymdata.adapters.local_models import load_tokenizer, local_folder
    from gymdata.stages.train_checks import ModelFacts

    require("train", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
    policy = weights.model_facts(model)
    folder = weights.tokenizer_folder(model)
    tokenizer = load_tokenizer(folder, extra="train")
    tokens = weights.tokenizer_facts(tokenizer, tokenizer.chat_template)
    limits = _limits(local_folder(policy["base"] or model))
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
