"""A finetuning run with everything resolved: what the loop does, and where it writes.

Invariants: the loop takes nothing from anywhere else; what of a plan must not change on a resume is ``identity``. Data
is made by gymdata's own commands, from the selected rollouts alone; an epoch that has nothing to learn from is
reported, and is not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gymdata.commands.finetune.port import Commands, EpochRow, TrajectoryBuilder
from gymdata.commands.finetune.settings import EpochsTrainer, FinetuningSection
from gymdata.curriculum import CurriculumConfig
from gymdata.progress import Progress
from gymdata.public import Figures
from gymdata.settings import Settings
from gymdata.store import hash_file
from gymdata.store.paths import Identity, RunFacts
from gymdata.store.run_json import plain, write_json

#: Formats of ``gymdata export`` that are made from pairs.
_OF_PAIRS = ("preference", "dpo")
NO_VARIANCE = "no selected group has rewards that differ"


def make_data(
    plan: Plan, folder: Path, kind: str, chosen: Settings, progress: Progress, kl_coef: float | None = None
) -> Figures:
    """``path`` of the data and its counts, or ``skipped`` with the reason. ``kl_coef``: as the epochs before have left it,
    in the place of that of the settings."""
    rollouts = folder / "selected" / "rollouts.parquet"
    if not chosen["groups_selected"]:
        return {"skipped": "no group was selected"}
    if kind == "rollouts":
        return {
            "path": str(rollouts),
            "rollouts_for_training": chosen["rollouts_selected"],
            "data_xxh3": hash_file(rollouts),
        }
    made_of_pairs = kind == "pairs" or (kind.startswith("export:") and any(word in kind for word in _OF_PAIRS))
    if (made_of_pairs or kind == "experiences") and not chosen["groups_learnable"]:
        return {"skipped": NO_VARIANCE}
    source, counts = rollouts, dict[str, Any]()
    if made_of_pairs:
        settings: dict[str, object] = {"seed": plan.loop.seed}
        if plan.judging is not None:
            settings |= {"source": "comparisons", "judge": plan.judging.name}
        settings |= plan.trainer.pairs
        result = _run(plan, folder, "pairs", rollouts, folder / "pairs", settings, progress)
        dropped = {reason: count for reason, count in result["dropped"].items() if count}
        counts = {"pairs": result["pairs"], "pair_candidates": result["candidates"], "pairs_dropped": dropped}
        source = folder / "pairs" / "pairs.parquet"
        if not counts["pairs"]:
            return {**counts, "skipped": "no pair came of the selected rollouts"}
    if kind == "experiences":
        settings = dict(plan.trainer.experience)
        if kl_coef is not None:
            settings["kl_coef"] = kl_coef
        if settings.get("kl_coef") and not (settings.get("reference") or settings.get("token_columns")):
            settings["reference"] = str(plan.start)
        result = _run(plan, folder, "experience", rollouts, folder / "experiences", settings, progress)
        source, kl = folder / "experiences" / "experiences.parquet", result["kl"]
        counts = {
            "sequences": result["counts"]["sequences"],
            "rollouts_left_out": {why: n for why, n in result["left_out"].items() if n},
            "groups_dropped": {why: n for why, n in result["dropped_groups"].items() if n},
            **({"kl_coef": kl["coef"], "kl_to_reference": kl["mean"]} if kl else {}),
            **({"next_kl_coef": kl["next_coef"]} if "next_coef" in kl else {}),
        }
    if kind.startswith("export:"):
        format = kind.removeprefix("export:")
        target = folder / "export" / ("data.parquet" if format == "verl" else "data.jsonl")
        words = ["export", str(source), "--format", format, "-o", str(target), "--overwrite"]
        plan.commands.run(words, folder / "logs" / "export.log", progress)
        source = target
    return {"path": str(source), **counts, "data_xxh3": hash_file(source)}


def _run(
    plan: Plan, folder: Path, command: str, source: Path, output: Path, settings: Settings, progress: Progress
) -> Figures:
    file = write_json(folder / f"{command}.yaml", plain(settings))
    words = [command, str(source), "-o", str(output), "--config", str(file), "--overwrite"]
    return plan.commands.run(words, folder / "logs" / f"{command}.log", progress)


#: Keys of the finetuning section that may differ when the same folder is resumed.
FREE = ("num_epochs", "output_dir", "endpoint_timeout", "deploy", "enabled")
#: Keys of a collection that may differ too: how often and how long to try, and how files are cut.
FREE_OF_COLLECTING = {
    *("allow_missing", "max_attempts", "give_up", "retries", "rows_per_file"),
    *("tool_timeout", "reward_timeout", "request_timeout"),
}


class Watch(Progress, Protocol):
    """Displays the loop. Never raises."""

    def stage(self, epoch: int, name: str) -> None: ...

    def epoch(self, row: EpochRow) -> None:
        """An epoch is over; ``row`` is its line of metrics.jsonl."""
        ...


@dataclass(frozen=True)
class Judging:
    """A generative judge in the place of rewards: the name of its scores, and settings of ``gymdata judge``."""

    name: str
    settings: Settings


@dataclass(frozen=True)
class Validation:
    """Held-out tasks and how they are sampled and scored. ``builder``, ``reward`` and ``judging`` differ from the loop's
    where validation has a configuration of its own."""

    tasks: str
    builder: TrajectoryBuilder
    settings: Settings
    interval: int
    threshold: float
    reward: tuple[str, ...]
    judging: Judging | None = None


@dataclass(frozen=True)
class Plan:
    """``start``: folder of the first policy, which training starts from. ``served``: rollouts come from an endpoint that
    keeps serving the first policy unless the loop has a ``deploy``. ``identity`` names inputs by their content;
    ``defaults``: of its settings, for a run that is too old to have them."""

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
    #: Writes report.html of the epochs so far into the folder.
    write_page: Callable[[Path], None] | None
    identity: Identity = field(default_factory=dict)
    defaults: Settings = field(default_factory=dict)
    facts: RunFacts = field(default_factory=dict)
    overwrite: bool = False

    def folder(self, epoch: int) -> Path:
        return self.output / f"epoch-{epoch:03d}"

    def validated(self, epoch: int) -> bool:
        """Whether held-out tasks are sampled after this epoch (0: before the first)."""
        if self.validation is None:
            return False
        return epoch in (0, self.loop.num_epochs) or epoch % self.validation.interval == 0
