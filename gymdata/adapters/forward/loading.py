"""Models as a forward pass needs them: loaded from this machine, in one number format, on one device.

What always holds: an adapter is put over its base and not merged into it, as the engine that sampled had it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gymdata.adapters.local_models import local_folder
from gymdata.errors import DataError, UsageError, needs

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Place:
    """Where to find a model and how to run it. ``base``: a folder or hub name; ``adapter``: a LoRA folder over it.

    ``dtype`` auto: the checkpoint's own on a graphics card, float32 on a processor, which is slow and inexact in less.
    ``device`` None: the first graphics card, where there is one.
    """

    base: str
    adapter: str | None = None
    dtype: str = "auto"
    device: str | None = None

    @property
    def name(self) -> str:
        return self.adapter or self.base


def load(place: Place, head: str, **options: Any) -> Any:
    """The model of the transformers auto class ``head``, ready to run. Raises DataError when it is none of that class, and
    UsageError for a device or number format that cannot be had."""
    with needs("train"):
        import torch
        import transformers
    if place.dtype not in DTYPES:
        raise UsageError.unknown_choice("--dtype", place.dtype, DTYPES)
    # Its bar is not ours, and models here load in seconds; what its report of weights would say, ``lacking`` says.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own lack of types
    device = _device(place.device)
    dtype: Any = getattr(torch, place.dtype, "auto")
    if place.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    loud = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # likewise
    try:
        model, told = getattr(transformers, head).from_pretrained(
            local_folder(place.base), dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
        if place.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, place.adapter).get_base_model()
    except (OSError, ValueError) as error:
        raise DataError.unreadable(place.name, f"no model there ({str(error).splitlines()[0]})") from error
    finally:
        transformers.utils.logging.set_verbosity(loud)
    lacking = [] if place.adapter else sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
    if lacking:
        raise DataError(f"{place.name}: its weights lack {', '.join(lacking[:3])}, so it is no {head}")
    # Router losses are for training, and need what is not kept here.
    model.config.output_router_logits = False
    return model.eval().to(device)


def checkpoint_dtype(place: Place) -> str | None:
    """The number format that a checkpoint was saved in, as its config says it."""
    from transformers import AutoConfig

    try:
        dtype = AutoConfig.from_pretrained(local_folder(place.base), local_files_only=True).dtype
    except (OSError, ValueError) as error:
        raise DataError.unreadable(place.name, f"no model there ({str(error).splitlines()[0]})") from error
    return None if dtype is None else str(dtype).removeprefix("torch.")


def facts(model: Any) -> dict[str, Any]:
    """Number format and device, for run.json."""
    parameter = next(model.parameters())
    return {"dtype": str(parameter.dtype).removeprefix("torch."), "device": parameter.device.type}


def _device(name: str | None) -> Any:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError.bad_value("--device", name, "cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"--device {name}: there is no such graphics card", hint="--device cpu")
    return device
