"""The trainer's own settings: which key belongs to which class of TRL, and a clear error for one that belongs to none.

The command checks the names, and the numbers that have limits, before anything is written or torch is loaded; the training
process, which has the classes, checks the types and sorts the keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from gymdata.commands.train.settings import OWN_PAIR_LOSSES
from gymdata.errors import UsageError
from gymdata.settings import Dtype, Settings, place_of

#: Key → the plain types that it takes; none where they are not known.
Fields = Mapping[str, Set[type]]
#: Keys that gymdata sets, or that would silently lose tokens → what to do instead.
RESERVED = {
    "output_dir": "use -o",
    "model_name_or_path": "use -m",
    "resume_from_checkpoint": "the same command resumes; --overwrite starts again",
    "max_length": "use --max-length",
    "truncation_mode": "--max-length keeps the beginning and prints what it costs",
    "dataloader_drop_last": "it would leave pairs out; every pair is trained",
    "remove_unused_columns": "the batches hold ids and masks only",
    "overwrite_output_dir": "use --overwrite",
    "push_to_hub": "upload the output folder with `hf upload`",
    "disable_tqdm": "progress is shown by gymdata",
    "dataset_num_proc": "nothing is tokenised",
    "padding_free": "this TRL does not honour it",
    "eos_token": "sequences end as they were sampled",
    "chat_template_path": "nothing is rendered",
    "pad_token": "set it in the tokenizer",
    "do_train": "it always trains",
    "eval_strategy": "collect held-out rollouts with the checkpoint instead",
}
#: Trainers whose class of settings is TRL's.
_OF_TRL = ("dpo", "kto", "reward")
_FROM_0 = (
    "learning_rate num_train_epochs warmup_steps weight_decay adam_epsilon max_grad_norm beta logging_steps save_steps "
    "dataloader_num_workers neftune_noise_alpha router_aux_loss_coef center_rewards_coefficient"
)
_FROM_1 = (
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps lora_r lora_alpha "
    "dataloader_prefetch_factor pad_to_multiple_of precompute_ref_batch_size ref_model_sync_steps torch_empty_cache_steps "
    "ddp_timeout ddp_bucket_cap_mb"
)
_SHARES = "label_smoothing_factor label_smoothing ld_alpha lora_dropout ref_model_mixup_alpha"
#: Bounds of the trainers' numbers: invalid below the first, above the second, or from the third on.
LIMITS: dict[str, tuple[float, float | None, float | None]] = {
    **dict.fromkeys(_FROM_0.split(), (0, None, None)),
    **dict.fromkeys(_FROM_1.split(), (1, None, None)),
    **dict.fromkeys(_SHARES.split(), (0, 1, None)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, None, 1)),
    **dict.fromkeys(("seed", "data_seed"), (0, None, 2**32)),
    "max_steps": (-1, None, None),
}
_SERVICES = (
    "tensorboard wandb trackio mlflow comet_ml swanlab clearml dvclive codecarbon neptune azure_ml dagshub flyte"
)
#: The values of ``report_to`` besides none, and the module and the package of those that are called otherwise.
SERVICES = (*_SERVICES.split(), "kubeflow", "all")
_MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}
_PACKAGES = {"azure_ml": "azureml-core", "flyte": "flytekit", "comet_ml": "comet-ml"}
#: The modules that a training imports first.
_NEEDED = ("torch", "transformers", "trl", "accelerate")


def _of_settings(key: str) -> str:
    return f"settings: {key}"


def check_settings(
    algorithm: str,
    values: Mapping[str, object],
    own: Iterable[str] = (),
    called: Callable[[str], str] = _of_settings,
    model: str | None = None,
) -> None:
    """Check the trainer's keys without loading it. Raises UsageError naming all that is wrong, or what is not installed.

    ``called``: what errors call a key. ``model``: what is to be trained."""
    for module in _NEEDED:
        if find_spec(module) is None:
            raise UsageError.missing_extra(module, "train")
    for service in sorted(reported_to(values)):
        if service not in SERVICES:
            raise UsageError.unknown_choice(called("report_to"), service, SERVICES)
        if service == "tensorboard" and find_spec(service) is None:
            raise UsageError.missing_extra(service, "train,tensorboard")
        if service != "all" and find_spec(_MODULES.get(service, service)) is None:
            package = _PACKAGES.get(service, service)
            raise UsageError(f"{called('report_to')}: {service} is not installed", hint=f"pip install {package}")
    known: Fields = {name: {float} if name in LIMITS else set() for name in _names(algorithm)}
    sort_settings(values, {"trainer": known}, own, called)
    # TRL refuses a loss that it does not have in its first step.
    losses = _written(r'\bloss_type == "(\w+)"', f"trl/trainer/{algorithm}_trainer.py")
    chosen = values.get("loss_type")
    for loss in [chosen] if isinstance(chosen, str) else chosen if isinstance(chosen, list) else ():
        loss_types = [*losses, *(OWN_PAIR_LOSSES if algorithm == "dpo" else ())]
        if losses and loss not in loss_types:
            raise UsageError.unknown_choice(called("loss_type"), str(loss), loss_types)
    of_adapter = model is not None and (Path(model) / "adapter_config.json").is_file()
    lora = next((key for key in values if key.startswith("lora_")), None)
    if lora is not None and "use_peft" not in values and not of_adapter:
        hint = "use_peft (on the command line --lora) trains one; with use_peft false it is accepted and without effect"
        raise UsageError(f"{called(lora)}: no adapter is trained", hint=hint)
    if of_adapter and values.get("use_peft"):
        # The second adapter would be saved without a base that can be loaded.
        raise UsageError(
            f"{called('use_peft')}: {model} is a LoRA folder, and a new adapter needs a complete model as its base",
            hint="leave the LoRA settings out to train this adapter further, or merge it first: "
            f"gymdata.merge_adapter({str(model)!r}, 'MODEL') in Python",
        )


def _names(algorithm: str) -> list[str]:
    """The keys of a trainer's own class and of TRL's ModelConfig."""
    own = f"trl/trainer/{algorithm}_config.py" if algorithm in _OF_TRL else "gymdata/commands/train/trainers/rl.py"
    return _written(r"^    (\w+): ", "transformers/training_args.py", own, "trl/trainer/model_config.py")


def _written(pattern: str, *files: str) -> list[str]:
    """What a pattern finds in files of packages, which are not imported: that takes seconds."""
    found: dict[str, None] = {}
    for package, _, path in (file.partition("/") for file in files):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            if (file := Path(folder, path)).is_file():
                found |= dict.fromkeys(re.findall(pattern, file.read_text("utf-8"), re.MULTILINE))
    return list(found)


def reported_to(values: Mapping[str, Any]) -> set[str]:
    """The services that ``report_to`` names: ``tensorboard``, ``wandb`` and the others that transformers knows."""
    services = values.get("report_to")
    return set([services] if isinstance(services, str) else services or ()) - {"none"}


def sort_settings(
    values: Mapping[str, object],
    classes: Mapping[str, Fields],
    own: Iterable[str] = (),
    called: Callable[[str], str] = _of_settings,
) -> dict[str, Settings]:
    """``values`` by class: name of class → its keyword arguments. The first class that has a key gets it.

    ``classes``: the fields of each and their types, as ``fields_of``. ``own``: gymdata's keys, offered as nearest names too.
    ``called``: what errors call a key. Raises UsageError for unknown or reserved keys, wrong types and numbers that mean
    nothing, all at once.
    """
    sorted_values: dict[str, Settings] = {name: {} for name in classes}
    keys: set[str] = set().union(*classes.values(), own) - RESERVED.keys()
    faults: list[UsageError] = []
    for key, value in values.items():
        home = next((name for name in classes if key in classes[name]), None)
        if key in RESERVED:
            faults.append(UsageError(f"{called(key)} cannot be set here", hint=RESERVED[key]))
        elif home is None:
            faults.append(UsageError.unknown_key(key, keys, place_of(called(key), key), value))
        else:
            try:
                setting = _coerced(key, value, classes[home][key], called(key))
                _refuse_senseless(key, setting, called(key))
                sorted_values[home][key] = setting
            except UsageError as error:
                faults.append(error)
    if faults:
        raise UsageError.several(faults)
    return sorted_values


def fields_of(cls: type) -> Fields:
    """The fields of a dataclass, and the plain types that each takes."""
    hints = get_type_hints(cls)
    return {field.name: _plain_kinds(hints[field.name]) for field in dataclasses.fields(cls) if field.init}


def _plain_kinds(hint: Any) -> set[type]:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members} - {NoneType}
    return kinds if kinds <= {int, float, bool, str, list, dict} else set()


def _coerced(key: str, value: Any, kinds: Set[type], name: str) -> Any:
    """``value`` as the declared type, or UsageError. Only lossless readings: 1 as 1.0, "1e-6" as a number, x as [x]."""
    if value is False and key.endswith("_strategy"):
        return "no"  # which YAML reads as false
    if key == "bf16" and value == "auto":
        return value  # where the processor multiplies in it
    if value is None or not kinds or any(_is(value, kind) for kind in kinds):
        return value
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                if kind in kinds:
                    return kind(value)
    if list in kinds and not isinstance(value, dict):
        return [value]
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise UsageError.bad_value(name, value, names)


def _refuse_senseless(key: str, value: Any, name: str) -> None:
    """Raises UsageError for a number that is NaN, infinite or outside of ``LIMITS``, and for a number format in which no
    model is saved."""
    if key == "dtype" and value is not None and value not in get_args(Dtype):
        raise UsageError.unknown_choice(name, str(value), get_args(Dtype))
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in inside):
        raise UsageError.bad_value(name, value, "a finite number")
    if key not in LIMITS or not (_is(value, float) or _is(value, int)):
        return
    if key == "max_steps" and value == 0:
        raise UsageError.bad_value(name, value, "a number of at least 1, or -1 for all epochs")
    least, most, below = LIMITS[key]
    if value < least or (most is not None and value > most) or (below is not None and value >= below):
        upper = f" and at most {most:g}" if most is not None else f" and below {below:,}" if below is not None else ""
        raise UsageError.bad_value(name, value, f"a number of at least {least:g}{upper}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
