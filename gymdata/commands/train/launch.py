"""Starts and follows the training process, which alone loads TRL and the model; the parent loads the tokenizer alone."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from gymdata import errors
from gymdata.commands.train.token_checksum import TokenFacts
from gymdata.commands.train.trainer_settings import reported_to
from gymdata.progress import Progress
from gymdata.settings import Settings, read_yaml
from gymdata.store.reading import child_environment
from gymdata.workers import safe_path
from gymdata.workers.signals import OWN_GROUP, how_ended, interruptions_passed_to, last_lines, send

if TYPE_CHECKING:
    from gymdata.commands.train.settings import TrainConfig


class Job(TypedDict, total=False):
    """A job file, besides the settings of its trainer, which lie beside these."""

    trainer: str
    data: str
    data_xxh3: list[str]
    model: str
    policy_hash: str
    output: str
    #: Keys of the library's trainer.
    settings: dict[str, object]
    own_keys: list[str]
    trained_tokens: TokenFacts
    dry_run: bool
    #: Of another machine's training.
    helps: bool
    #: Of a training from text: its settings as given, and those that the text decided.
    asked: dict[str, object]
    set_by_text: dict[str, object]
    num_processes: int
    launcher: str
    accelerate_config: str | None
    machine_rank: int | None
    shard_model: bool


#: The process is offline and reports to its parent only.
_ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TQDM_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
}
#: On a busy machine, threads that spin while waiting made a step four times as long; sleeping costs nothing measurable
#: on a quiet one. The user's own setting wins.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
#: Variables by which clusters set the ranks of their pods; the launcher sets those of each process.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
#: Begins each line of the process's stdout that is meant for its parent.
EVENT = "@gymdata "


def run_job(job_file: Path, progress: Progress) -> dict[str, Any]:
    """Run a job to its end. Returns ``{"proof": …}`` as the process announced it before its first step.

    Raises the GymdataError that the process reported, OutsideError("trainer") when it died without a report, and
    KeyboardInterrupt after a Ctrl-C that it obeyed.
    """
    log = job_file.parent / "trainer.log"
    announced: dict[str, Any] = {}
    settings = json.loads(job_file.read_text())["settings"]
    own = {name: value for name, value in os.environ.items() if name not in _RANKS}
    environment = {**_DEFAULTS, **own, **_ENVIRONMENT, **child_environment()}
    environment |= {"PYTHONSAFEPATH": "1"} if safe_path() else {}
    environment |= _reporting(settings, job_file.parent.parent / "logs")
    command = [sys.executable, "-m", "gymdata.commands.train.trainers.run", str(job_file)]
    with log.open("ab") as noise:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, stdin=subprocess.DEVNULL, env=environment, **OWN_GROUP
        )
        try:
            with interruptions_passed_to(process):
                assert process.stdout is not None
                for raw in process.stdout:
                    line = raw.decode(errors="replace")
                    if line.startswith(EVENT):
                        _handle_event(json.loads(line[len(EVENT) :]), announced, progress)
                    else:
                        noise.write(raw)
                        noise.flush()
                code = process.wait()
        finally:
            send(process, signal.SIGTERM)
            process.wait()
    if "error" in announced:
        raise pickle.loads(bytes.fromhex(announced["error"]["pickled"]))  # noqa: S301 - of the process started above
    if code in (errors.EXIT_INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if code != 0:
        last = "\n".join(f"    {line}" for line in last_lines(log))
        raise errors.OutsideError(
            "trainer",
            f"the training process {how_ended(code)}; its last lines:\n{last}",
            hint=f"the whole log is {log}; the same command resumes from the last checkpoint",
        )
    return announced


def machine_rank(config: TrainConfig) -> int:
    """Which of several machines this one is, by the settings or what the launcher is configured with; 0 is the first, which
    writes the output. Raises UsageError for a rank that is no number and for a file that is not accelerate's."""
    if config.machine_rank is not None:
        return config.machine_rank
    setting, rank = "PET_NODE_RANK", "0"
    if config.launcher == "torchrun":
        rank = os.environ.get(setting) or "0"
    elif config.accelerate_config is not None:
        file = config.accelerate_config
        if not (accelerate := read_yaml(file)):
            raise errors.UsageError(
                f"{file} holds no settings of accelerate", hint="`accelerate config --config_file FILE` writes them"
            )
        setting, rank = f"machine_rank in {file}", str(accelerate.get("machine_rank", 0))
    if not rank.isdecimal():
        raise errors.UsageError.bad_value(setting, rank, "a number from 0")
    return int(rank)


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


def _handle_event(message: Mapping[str, Any], announced: dict[str, Any], progress: Progress) -> None:
    kind = message["event"]
    if kind in ("step", "scored"):
        progress.update(**{name: value for name, value in message.items() if name != "event"})
        return
    if kind == "note":
        progress.message(message["text"])
        return
    announced.setdefault(kind, message)
    if kind == "proof":
        file, batches = message["file"], message["batches"]
        same = "equal" if message["equal"] else "NOT EQUAL"
        some = "the first " if file != batches and message["equal"] else ""
        progress.message(
            f"trained tokens: file {file['count']:,} checksum {file['checksum']}, {some}batches {batches['count']:,} "
            f"checksum {batches['checksum']}: {same}"
        )
