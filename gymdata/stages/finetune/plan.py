"""A finetuning run with everything resolved: what the loop does, and where it writes.

What always holds: the loop takes nothing from anywhere else; what of a plan must not change on a resume is ``identity``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gymdata.config.finetune import EpochsTrainer, FinetuningSection
from gymdata.core.curriculum import CurriculumConfig
from gymdata.ports import Commands, Progress, TrajectoryBuilder

#: Keys of the finetuning section that may differ when the same folder is gone on with.
FREE = ("num_epochs", "output_dir", "endpoint_timeout", "tensorboard", "deploy", "enabled", "run_id")
#: Keys of a collection that may differ too: how often and how long to try, and how files are cut.
FREE_OF_COLLECTING = {
    "allow_missing", "max_attempts", "give_up", "tool_timeout", "reward_timeout", "request_timeout", "retries",
    "rows_per_file",
}  # fmt: skip


class Watch(Progress, Protocol):
    """Who watches the loop: a table on a terminal, or a line an epoch. Never raises."""

    def stage(self, epoch: int, name: str) -> None:
        """A stage begins."""
        ...

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is over; ``row`` is its line of metrics.jsonl."""
        ...


@dataclass(frozen=True)
class Judging:
    """A generative judge in the place of rewards: the name of its scores, and settings of ``gymdata judge``."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Validation:
    """Held-out tasks and how they are sampled and scored. ``builder``, ``reward`` and ``judging`` differ from the loop's
    where validation has a configuration of its own."""

    tasks: str
    builder: TrajectoryBuilder
    settings: Mapping[str, Any]
    interval: int
    threshold: float
    reward: tuple[str, ...]
    judging: Judging | None = None


@dataclass(frozen=True)
class Plan:
    """``start``: folder of the first policy, which training starts from. ``served``: rollouts come from an endpoint that
    goes on serving the first policy unless ``deploy`` is there. ``identity`` names inputs by their content."""

    output: Path
    tasks: str
    start: Path
    served: bool
    reward: tuple[str, ...]
    judging: Judging | None
    curriculum: CurriculumConfig
    loop: FinetuningSection
    trainer: EpochsTrainer
    validation: Validation | None
    commands: Commands
    #: (rollouts, first policy, file to write, how many, log, progress): see gymdata.adapters.trainers.start_kl.
    measure_kl: Callable[[Path, Path, Path, int, Path, Progress], Mapping[str, Any]] | None
    #: Writes curve.png and report.html of the rows so far.
    draw: Callable[[Path, list[dict[str, Any]], Mapping[str, Any]], None] | None
    #: Makes the endpoint serve a model as a version: (model, version, log, progress).
    deploy: Callable[[Path, int, Path, Progress], None] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False

    def folder(self, epoch: int) -> Path:
        return self.output / f"epoch-{epoch:03d}"

    def validated(self, epoch: int) -> bool:
        """Whether held-out tasks are sampled after this epoch (0: before the first)."""
        if self.validation is None:
            return False
        return epoch in (0, self.loop.num_epochs) or epoch % self.validation.interval == 0
