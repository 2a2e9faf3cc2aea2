"""Every trainer on one saved set of rollouts of the shipped policy: how far each raises held-out accuracy.

Invariants: the trainers see the same rollouts and start from the same policy; every step is a command that a user
could type, run as a process of its own; the figures are recomputed from sealed held-out runs and the trainings' run.json.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymdata.commands.demo import steps as demo
from gymdata.commands.demo.run import DEFAULT_SEED
from gymdata.commands.report.run import report
from gymdata.errors import RefusedError
from gymdata.store import read_run_json


@dataclass(frozen=True)
class Recipe:
    """A row of the table: what it is called, ``train-…``, the folder that it reads, and settings beside the shipped ones."""

    title: str
    command: str
    source: str
    settings: Sequence[str] = ()

    @property
    def words(self) -> list[str]:
        return [word for setting in self.settings for word in ("--set", setting)]


#: The trainings, in the order of the table. ``distilled``: experiences with the advantages that the policy of ``sft`` gives.
RECIPES = {
    "sft": Recipe("SFT on the best right rollout of each task", "sft", "rollouts"),
    "kto": Recipe("KTO on all rollouts", "kto", "rollouts"),
    "dpo": Recipe("DPO on pairs", "dpo", "pairs"),
    # The only pair loss that reads how much better the chosen side is.
    "rpo": Recipe(
        "DPO on pairs, `loss_type: rpo_sq` (reward margins)", "dpo", "pairs", ["loss_type=rpo_sq", "loss_weights=null"]
    ),
    "rl": Recipe("batch RL on GRPO advantages, `cispo`", "rl", "experiences"),
    # Ratios of sequences: nothing of a sequence is clipped alone.
    "rl-gspo": Recipe(
        "batch RL, `gspo` (ratios of sequences)", "rl", "experiences", ["loss=gspo", "clip_low=0.2", "clip_high=0.27"]
    ),
    # Made for rollouts of another policy: right ones count whole, wrong ones by a truncated weight.
    "rl-topr": Recipe("batch RL, `topr` (tapered off-policy)", "rl", "experiences", ["loss=topr"]),
    # A regression without ratios.
    "rl-oapl": Recipe(
        "batch RL, `oapl` (regression on the optimal advantage)", "rl", "experiences", ["loss=oapl", "tau=0.5"]
    ),
    "rl-filtered": Recipe("batch RL, `filtered_bc` (A > 0 only)", "rl", "experiences", ["loss=filtered_bc"]),
    "distilled": Recipe(
        "distillation: reverse KL to the policy of the first row, on the same rollouts", "rl", "teacher"
    ),
    "reward": Recipe("reward model", "reward", "pairs"),
}
#: Those that leave a policy.
POLICIES = tuple(name for name in RECIPES if name != "reward")
_NAMES = "|".join(RECIPES)
#: The names in the output folder.
_OUTPUTS = re.compile(
    rf"heldout-(before|{_NAMES})|rollouts|pairs|experiences|teacher|{_NAMES}|summary\.json|\.?report-({_NAMES})\.html(\.tmp)?"
)


def compare_trainers(
    output: str | Path = "runs/compare-trainers",
    *,
    num_rollouts: int = 8,
    limit: int | None = None,
    trainers: Sequence[str] = tuple(RECIPES),
    seed: int = DEFAULT_SEED,
    threshold: bool = True,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    run_command: Callable[[Sequence[str], Collection[int]], None] | None = None,
) -> dict[str, Any]:
    """Collect once, train with each of ``trainers``, and return what ``OUTPUT/summary.json`` holds.

    ``limit`` takes only so many tasks of each file. ``run_command`` gets the words of each command after ``gymdata``, and
    the exit codes that are fine; by default each is a process. With ``threshold``, raises RefusedError unless every
    trainer's paired 95 % interval of the rise is above zero and the reward model's interval on held-out pairs is above one
    half.
    """
    folder, began = Path(output), time.monotonic()
    demo.clear(folder, overwrite, _OUTPUTS)
    run = _Comparison(folder, seed, limit, run_command or demo.running(say))
    run.held_out("heldout-before", run.data / "policy")
    run.collect_once(num_rollouts)
    for name in trainers:
        run.train_with(name)
        if name in POLICIES:
            run.held_out(f"heldout-{name}", folder / name)
    summary = summarise(folder, trainers)
    summary["seconds"] = round(time.monotonic() - began, 1)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for name in filter(POLICIES.__contains__, trainers):
        report(folder / "heldout-before", folder / f"heldout-{name}", output=folder / f"report-{name}.html")
    if threshold:
        _require(summary, folder)
    return summary


def summarise(folder: Path, trainers: Sequence[str]) -> dict[str, Any]:
    """Held-out rates with Wilson intervals and paired differences, a trainer; and the reward model's ranking."""
    jobs = {name: read_run_json(folder / name) for name in trainers}
    found: dict[str, Any] = {"trainers": {}}
    for name in trainers:
        facts = {
            "trained_tokens": jobs[name]["trained_tokens"]["batches"]["count"],
            "equal": jobs[name]["trained_tokens"]["equal"],
            "steps": jobs[name]["steps"],
            "counts": jobs[name]["counts"],
        }
        if name == "reward":
            found["reward_model"] = {**facts, **jobs[name]["heldout"]}
            continue
        rise = demo.rise(folder / "heldout-before", folder / f"heldout-{name}")
        found["before"] = rise.pop("before")
        found["trainers"][name] = {**facts, **rise}
    return found


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a table."""
    lines = [
        "| trainer | steps | tokens per epoch | held-out | improvement, points (95 %) |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    if before := summary.get("before"):
        lines.append(f"| none | | | {_rate(before)} | |")
    for name, facts in summary["trainers"].items():
        change, (low, high) = facts["difference"]["rate"], facts["difference"]["ci95"]
        lines.append(
            f"| {RECIPES[name].title} | {facts['steps']} | {facts['trained_tokens']:,} | {_rate(facts['after'])} | "
            f"**{100 * change:+.1f}** [{100 * low:.1f}, {100 * high:.1f}] |"
        )
    if model := summary.get("reward_model"):
        low, high = model["ci95"]
        lines.append(
            f"| reward model | {model['steps']} | {model['trained_tokens']:,} | ranks {model['accuracy']:.1%} of "
            f"{model['pairs']:,} pairs of {model['tasks']} held-out tasks right [{low:.1%}, {high:.1%}] | |"
        )
    return "\n".join(lines)


class _Comparison(demo.Steps):
    """The comparison's steps as command lines over one output folder."""

    def collect_once(self, num_rollouts: int) -> None:
        rollouts = str(self.folder / "rollouts")
        flags = ["-r", str(num_rollouts), "--seed", str(self.seed)]
        self.collect("train", self.data / "policy", self.folder / "rollouts", flags)
        self.run("validate", rollouts, "--quiet")
        self.run("pairs", rollouts, "-o", str(self.folder / "pairs"), "--strategy", "all", "--max-pairs-per-task", "4",
                  "--seed", str(self.seed))  # fmt: skip
        self.run("experience", rollouts, "-o", str(self.folder / "experiences"), "--estimator", "grpo",
                  "--optimal-value-beta", "0.5")  # fmt: skip

    def train_with(self, name: str) -> None:
        recipe = RECIPES[name]
        if recipe.source == "teacher":
            self.run("experience", str(self.folder / "rollouts"), "-o", str(self.folder / "teacher"),
                      "--teacher", str(self.folder / "sft"))  # fmt: skip
        self.run(f"train-{recipe.command}", str(self.folder / recipe.source), "-m", str(self.data / "policy"),
                  "-o", str(self.folder / name), "--config", str(self.data / f"{recipe.command}.yaml"),
                  "--set", f"seed={self.seed}", *recipe.words)  # fmt: skip


def _rate(figures: Mapping[str, Any]) -> str:
    low, high = figures["ci95"]
    return f"{figures['rate']:.1%} of {figures['n']} [{low:.1%}, {high:.1%}]"


def _require(summary: Mapping[str, Any], folder: Path) -> None:
    poor = [name for name, facts in summary["trainers"].items() if not facts["difference"]["ci95"][0] > 0]
    if "reward_model" in summary and not summary["reward_model"]["ci95"][0] > 0.5:
        poor.append("reward")
    if poor:
        raise RefusedError(
            f"not clearly better than before: {', '.join(poor)}",
            hint=f"{folder / 'summary.json'} has the figures; the runs beside it can be queried",
        )
