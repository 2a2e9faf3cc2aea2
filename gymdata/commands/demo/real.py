"""The main job on a pretrained model: sentences to JSON, from one set of rollouts with SFT (LoRA), DPO and batch RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gymdata.commands.demo.model import MODEL
from gymdata.commands.demo.steps import Run, Steps, require_rise, rise, shown_rise, tokens_and_breaks
from gymdata.public import Figures, Report, Row, rate_text
from gymdata.store import read_run_json

#: Rollouts per training task.
NUM_ROLLOUTS = 6
TEMPERATURE = 0.8
#: Of the rewards of a pair: the chosen answer is right, the rejected one is worth nothing.
MIN_MARGIN = 0.9
#: Rollouts that are scored again before training.
AUDITED = 48
#: What the interval of each improvement must be above.
MIN_LOW = 0.20
#: Policy → what it is trained on, below the output folder.
SOURCES = {"sft": "rollouts", "dpo": "pairs", "rl": "experiences"}


@dataclass(frozen=True, slots=True, repr=False)
class RealDemoReport(Report):
    """The content of ``OUTPUT/summary.json``: for each of ``policies`` the held-out rates ``before`` and ``after`` with
    their Wilson intervals and the paired ``difference``; ``steps``: the seconds of each command."""

    output: Path
    model: str
    policies: dict[str, Figures]
    tokens_sampled: int
    breaks: int
    seeds: list[int]
    steps: list[Figures]
    seconds: float

    @classmethod
    def of(
        cls, folder: Path, runs: Sequence[Path], seed: int, steps: Sequence[tuple[str, float]], seconds: float
    ) -> RealDemoReport:
        """The figures, recomputed from the sealed runs of ``folder``."""
        sampled, breaks = tokens_and_breaks(runs)
        policies = {}
        for name in SOURCES:
            facts = read_run_json(folder / name)
            trained = {"tokens_trained": facts["trained_tokens"]["batches"]["count"], "steps": facts["steps"]}
            policies[name] = {**rise(folder / "heldout-before", folder / f"heldout-{name}"), **trained}
        timed = [{"command": command, "seconds": s} for command, s in steps]
        return cls(folder, MODEL, policies, sampled, breaks, [seed], timed, seconds)

    def to_dict(self) -> Figures:
        return {name: value for name, value in asdict(self).items() if name != "output"}

    def require_rise(self) -> None:
        """Raises RefusedError unless the interval of each policy's rise is above 20 points."""
        for name, figures in self.policies.items():
            require_rise(figures["difference"], f"with train-{name}", self.output, MIN_LOW)

    def rows(self) -> list[Row]:
        before = next(iter(self.policies.values()))["before"]
        rises = [
            row
            for name, figures in self.policies.items()
            for row in shown_rise(figures["after"], figures["difference"], f"{name}: ")
        ]
        seconds: dict[str, float] = {}
        for step in self.steps:
            seconds[step["command"]] = seconds.get(step["command"], 0) + step["seconds"]
        return [
            ("model", self.model),
            ("held-out before", f"{rate_text(before)}, {before['successes']} of {before['n']}"),
            *rises,
            ("tokens sampled", self.tokens_sampled),
            ("breaks", self.breaks),
            *((f"seconds of {command}", round(spent, 1)) for command, spent in seconds.items()),
            ("seconds", self.seconds),
            ("written to", self.output / "summary.json"),
            *(("report", self.output / f"report-{name}.html") for name in self.policies),
        ]


class RealSteps(Steps):
    """The steps of the demo of the real model, which is in ``model``."""

    tasks = "sentences-"

    def __init__(self, folder: Path, model: Path, seed: int, limit: int | None, run: Run) -> None:
        super().__init__(folder, seed, limit, run)
        self.model = model
        self.rewards = str(self.data / "sentences.py")
        self.scored = ["--reward", f"{self.rewards}:right_values"]

    def all(self, num_rollouts: int) -> list[Path]:
        """Every step, in order; the folders of all rollouts."""
        self.held_out("heldout-before", self.model)
        rollouts = self.folder / "rollouts"
        # Kept beside the reward, for batch RL.
        sampled = ["--reward", f"{self.rewards}:all_right=0"]
        sampled += ["-r", str(num_rollouts), "--temperature", str(TEMPERATURE), "--seed", str(self.seed)]
        self.collect("train", self.model, rollouts, sampled)
        self.run("validate", str(rollouts), "--quiet")
        self.run("audit", str(rollouts), "-m", str(self.model), "-n", str(AUDITED))
        certain = ["--min-margin", str(MIN_MARGIN), "--seed", str(self.seed)]
        self.run("pairs", str(rollouts), "-o", str(self.folder / "pairs"), *certain)
        # Where no answer of a task is right, the reward would teach the best of the wrong ones.
        self.run("experience", str(rollouts), "-o", str(self.folder / "experiences"), "--reward", "all_right")
        for name, source in SOURCES.items():
            recipe = ["--config", str(self.data / "recipes" / f"{name}-135m.yaml"), "--set", f"seed={self.seed}"]
            trained = self.folder / name
            self.run(f"train-{name}", str(self.folder / source), "-m", str(self.model), "-o", str(trained), *recipe)
            self.held_out(f"heldout-{name}", trained)
        return [self.folder / "heldout-before", rollouts, *(self.folder / f"heldout-{name}" for name in SOURCES)]
