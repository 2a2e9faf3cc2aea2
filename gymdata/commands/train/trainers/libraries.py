"""What the libraries print, log and report while a training uses them."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from transformers.utils import logging as transformers_logging

from gymdata.commands.train.trainer_settings import reported_to
from gymdata.errors import GymdataError, OutsideError
from gymdata.settings import Settings

#: Whose warnings go to the log of the training.
_LIBRARIES = ("transformers", "trl", "accelerate", "peft", "datasets", "torch", "py.warnings")


@contextlib.contextmanager
def used(settings: Settings, out: Path | None) -> Iterator[None]:
    """What the libraries print and log within this goes to ``out``'s trainer.log (None: nowhere), their reports beside the
    model, and what they raise is the trainer's failure."""
    place = Path(os.devnull) if out is None else out / "job" / "trainer.log"
    os.environ.update(_reporting(settings, out / "logs") if out else {})
    with place.open("a") as log, contextlib.redirect_stdout(log), _logged(log):
        try:
            yield
        except (GymdataError, KeyboardInterrupt):
            raise
        except Exception as error:
            traceback.print_exc(file=log)
            raise OutsideError("trainer", f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _logged(log: IO[str]) -> Iterator[None]:
    """What the libraries log and warn of goes to ``log``; they draw no bars."""
    bars: Any = transformers_logging
    has_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    handler = logging.StreamHandler(log)
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        if has_bars:
            bars.enable_progress_bar()
        logging.captureWarnings(False)
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


def _reporting(settings: Settings, logs: Path) -> dict[str, str]:
    """Environment variables of the reporting services: their files go beside the model, unless set otherwise.
    TensorBoard's default is beside the checkpoints, with which its events would be removed."""
    defaults = {
        "TENSORBOARD_LOGGING_DIR": str(logs),
        "WANDB_DIR": str(logs),
        "TRACKIO_DIR": str(logs / "trackio"),
        "WANDB_PROJECT": "gymdata",
    }
    environment = {name: value for name, value in defaults.items() if name not in os.environ}
    services = reported_to(settings)
    if not {"wandb", "all"} & services:
        environment["WANDB_DISABLED"] = "true"
    if "wandb" in services:
        logs.mkdir(exist_ok=True)  # W&B would replace a missing folder by a temporary one
    if "trackio" in services and settings.get("trackio_space_id"):
        environment["HF_HUB_OFFLINE"] = "0"
    return environment
