"""Trains a job in this process, with what TRL and the libraries below it read of the environment.

Of several processes that `accelerate launch` started, each runs the command; the first one checks and prepares the data,
tells the others, and writes the output.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gymdata.commands.train.job import Job, processes
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures

#: What the libraries read of the environment when they are loaded.
_ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
#: On a busy machine, threads that spin while waiting made a step four times as long; sleeping costs nothing measurable
#: on a quiet one. The user's own setting wins.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}


def run(job: Job, progress: Progress) -> Figures:
    """Train ``job``, whose data is prepared in its output folder, to its end; of a dry run do all that comes before the
    first step. Returns the figures for run.json.

    Raises what is wrong with the settings or the data, OutsideError("trainer") for whatever the libraries raise, and
    KeyboardInterrupt after a Ctrl-C, for which a checkpoint was saved.
    """
    figures = _together(job, job, Path(job["output"]), progress)
    assert figures is not None  # this process has something to train
    return figures


def follow(job: Job) -> None:
    """Take part in the training of the first process, which has the same settings as ``job`` and the rest; nothing where
    that has nothing to train."""
    _together(job, None, None, NullProgress())


def dismiss(job: Job) -> None:
    """Tell the other processes that there is nothing to train."""
    if processes() > 1:
        _together(job, None, None, NullProgress())


def _together(job: Job, whole: Job | None, out: Path | None, progress: Progress) -> Figures | None:
    """Join the other processes with the settings of ``job``, and train what the first of them has: ``whole`` where this is
    it. None where that is nothing."""
    from gymdata.commands.train.trainers import libraries
    from gymdata.commands.train.trainers import run as trainers

    with libraries.used(job["settings"], out):
        arguments = trainers.arguments(job)
        whole = trainers.of_first(whole)
        return None if whole is None else trainers.train(whole, arguments, progress)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """The libraries that are loaded within this are offline, silent, and wait asleep."""
    before = dict(os.environ)
    os.environ.update({**_DEFAULTS, **before, **_ENVIRONMENT})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
