"""The protocols of training: adapters, builders, and the loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

from gymdata.progress import Progress
from gymdata.public import Figures
from gymdata.settings import Settings


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One epoch's training. ``job_id`` is the same for every try of the epoch, so a remote trainer can refuse a second.

    ``data``: the file or run folder, of the kind that ``TrainerAdapter.data`` returned. ``output``: the folder that
    must be a model for the next epoch's collecting when the job is done.
    """

    job_id: str
    epoch: int
    algorithm: str
    data: Path
    model: Path
    output: Path
    seed: int = 0


class HeldOut(TypedDict):
    """The rate of held-out rollouts with a reward above the threshold, and its 95 % interval."""

    n: int
    tasks: int
    successes: int
    rate: float | None
    ci95: list[float] | None
    reward_mean: float | None
    unscored: int
    policy_version: int


class EpochRow(TypedDict, total=False):
    """What is read of an epoch's line of metrics.jsonl, which has more."""

    epoch: int
    reward_mean: float | None
    reward_ci95: list[float] | None
    groups: int
    groups_selected: int
    curriculum: Figures
    #: Why nothing was trained.
    skipped: str
    trained_tokens: int | None
    training_loss: float | None
    kl_to_start: float | None
    validation: HeldOut | None


class TrainerAdapter(Protocol):
    """Trains the policy of an epoch, wherever that is done."""

    def data(self, algorithm: str) -> str:
        """What a job reads: ``rollouts``, ``pairs``, ``experiences``, or ``export:FORMAT`` of ``gymdata export``.

        Raises UsageError for an algorithm that this trainer has not."""
        ...

    def train(self, job: TrainingJob, progress: Progress) -> None:
        """Return when ``job.output`` is a model; what an earlier try left there is resumed or removed. What ``progress``
        gets is what the loop prints. Raises what ended the training: OutsideError("trainer", …), or KeyboardInterrupt
        after a Ctrl-C."""
        ...


@dataclass(frozen=True, slots=True)
class CollectOrder:
    """Rollouts to collect into ``output``, a run folder that is resumed when it is there.

    ``model``: folder of the policy, or None where only an endpoint's is used. ``settings``: keys of CollectConfig that
    beat the builder's own. ``reward``: reward specs as ``gymdata collect --reward`` takes them; none when a judge scores.
    """

    tasks: str
    output: Path
    model: str | None
    policy_version: int
    run_id: str
    seed: int
    reward: Sequence[str] = ()
    settings: Settings = field(default_factory=dict)


class TrajectoryBuilder(Protocol):
    """Collects the rollouts of one epoch and groups them (``group_id``); its result is the run folder."""

    def collect(self, order: CollectOrder, progress: Progress) -> None:
        """Sample the pending rollouts of ``order``. Called again after a crash: what is there is kept.

        Raises GymdataError when the rollouts are not all there."""
        ...


class Trainer(Protocol):
    """The loop over epochs. ``plan`` is a ``gymdata.commands.finetune.plan.Plan``."""

    def run(self, plan: Any, builder: TrajectoryBuilder, adapter: TrainerAdapter, watch: Any) -> Figures:
        """Run or resume the plan; returns the final result. Raises what ended it early."""
        ...


class Commands(Protocol):
    """Runs commands of gymdata, each as a process of its own that ends when this one does."""

    def run(self, words: Sequence[str], log: Path, progress: Progress) -> Figures:
        """``gymdata WORDS --json``; what it printed. Its stderr goes to ``log``. Raises a GymdataError that has its
        exit code and its last lines of output."""
        ...
