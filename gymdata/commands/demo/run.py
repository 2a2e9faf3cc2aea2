"""The main job on the shipped policy and tasks: measure, (collect, validate, pairs, train-dpo) a few times, measure again.

Also one round from the same first rollouts whose pairs come from the shipped judge, which never sees a reward.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.commands.demo.model import cached_folder, cached_model, require_model
from gymdata.commands.demo.real import NUM_ROLLOUTS, RealDemoReport, RealSteps
from gymdata.commands.demo.steps import (
    NEEDED,
    Steps,
    clear,
    refuse_foreign,
    require_rise,
    rise,
    running,
    sample_data,
    shown_rise,
    tokens_and_breaks,
)
from gymdata.commands.judge.groups import MATCH_COLUMNS, matches_in
from gymdata.commands.report.run import report as write_page
from gymdata.errors import EXIT_FAULTS, EXIT_OK, DataError, UsageError, require
from gymdata.genrm.bias import against_rewards
from gymdata.public import Figures, Report, Row, rate_text
from gymdata.rollouts.schema import COMPARISONS
from gymdata.settings import Config, OnlyWith
from gymdata.store import read_run_json, read_table
from gymdata.store.paths import local_output
from gymdata.store.run_json import write_text

_OUTPUTS = {False: "runs/demo", True: "runs/demo-real"}
#: The unseeded default of the demo is a seed too, so that two people see the same figures.
DEFAULT_SEED = 0
#: Enough for the judged improvement to be clear, and few enough for a short demo: 56 comparisons each.
JUDGED_GROUPS = 300
JUDGE = "genrm"
OWN_ROLLOUTS = 8


class DemoConfig(Config):
    """The keywords of ``gymdata.demo`` that a command line gives."""

    real: bool = pydantic.Field(
        False, description="Train a pretrained model, SmolLM2-135M-Instruct, with train-sft, train-dpo and train-rl."
    )
    rounds: int = pydantic.Field(2, ge=1, description="Rounds of collect, pairs and train-dpo.")
    num_rollouts: int | None = pydantic.Field(
        None, ge=2, description=f"Rollouts per training task (default: {OWN_ROLLOUTS}; with --real {NUM_ROLLOUTS})."
    )
    limit: int | None = pydantic.Field(None, ge=1, description="Use only the first N tasks.")
    judged_groups: int = pydantic.Field(
        JUDGED_GROUPS, ge=0, description="Groups compared by the judge; 0 disables the judge."
    )
    seed: int = pydantic.Field(DEFAULT_SEED, description="Random seed.")
    threshold: bool = pydantic.Field(
        True, description="Fail unless held-out accuracy improves by 10 points; with --real, surely by 20."
    )
    not_with: ClassVar[OnlyWith] = {
        name: ("{real:True}", lambda config: not config.real) for name in ("rounds", "judged_groups")
    }


@dataclass(frozen=True, slots=True, repr=False)
class DemoReport(Report):
    """The content of ``OUTPUT/summary.json``: held-out rates ``before`` and ``after`` with their Wilson intervals, the
    paired ``difference``, and ``judged``: the same where pairs come from the judge (None without one)."""

    output: Path
    before: Figures
    after: Figures
    difference: Figures
    tokens_sampled: int
    tokens_trained: int
    pairs: int
    breaks: int
    judged: Figures | None
    seconds: float

    def to_dict(self) -> Figures:
        figures = asdict(self)
        return {k: v for k, v in figures.items() if k != "output" and (k != "judged" or v is not None)}

    def require_rise(self) -> None:
        """Raises RefusedError unless the rate rose by at least 10 points, both ways, with each interval above zero."""
        require_rise(self.difference, "with pairs from rewards", self.output)
        if self.judged is not None:
            require_rise(self.judged["difference"], "with pairs from comparisons", self.output)

    def rows(self) -> list[Row]:
        return [
            ("held-out before", f"{rate_text(self.before)}, {self.before['successes']} of {self.before['n']}"),
            *shown_rise(self.after, self.difference, ""),
            ("tokens sampled", self.tokens_sampled),
            ("tokens trained", self.tokens_trained),
            ("pairs", self.pairs),
            ("breaks", self.breaks),
            *(_shown_judged(self.judged) if self.judged else []),
            ("seconds", self.seconds),
            ("written to", self.output / "summary.json"),
            ("report", self.output / "report.html"),
        ]


def _shown_judged(judged: Figures) -> list[Row]:
    """One round whose pairs come from the judge."""
    accuracy, bias = judged["accuracy"], judged["bias"]
    counts = judged["comparisons"]
    rates = {
        "the better one first": accuracy["first_position"],
        "the better one second": accuracy["second_position"],
        "position bias (first wins)": bias["position_bias"],
        "position inconsistency": bias["position_inconsistency"],
        "longer wins": bias["longer_wins"],
        "ties": bias["ties"],
        "failures": bias["failures"],
    }
    return [
        *shown_rise(judged["after"], judged["difference"], "judged: "),
        ("judged: comparisons", f"{sum(counts.values()):,}, {counts['judged']:,} judged"),
        *((f"judged: {name}", rate_text(part)) for name, part in rates.items() if part["n"]),
        ("judged: pairs", judged["pairs"]),
    ]


@dataclass(frozen=True, slots=True, repr=False)
class DemoPlan(Report):
    """The plan of ``demo``: ``steps`` (its commands, in order), ``reads`` (the shipped files, all of which are there),
    and ``install``: the command for what the steps need and this environment lacks, None for nothing."""

    steps: list[str]
    reads: list[str]
    install: str | None

    def rows(self) -> list[Row]:
        return [("step", step) for step in self.steps]


def demo(
    output: str | Path | None = None,
    *,
    real: bool = False,
    rounds: int = 2,
    num_rollouts: int | None = None,
    limit: int | None = None,
    judged_groups: int = JUDGED_GROUPS,
    seed: int = DEFAULT_SEED,
    threshold: bool = True,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> DemoReport | RealDemoReport:
    """Run the main job; what it measured is also in ``OUTPUT/summary.json`` (default: runs/demo, runs/demo-real).

    ``limit`` takes only the first N tasks of each file; ``judged_groups``: in how many groups the judge compares
    rollouts (0: no judge). With ``threshold``, raises RefusedError unless the held-out rate rose by at least 10 points, both
    ways, and the paired 95 % interval of the rise is above zero.

    ``real`` does it with a pretrained model on tasks of its own, without rounds and judge, and trains with SFT, DPO and
    batch RL; with ``threshold`` the interval of each rise must be above 20 points.
    """
    require(*NEEDED)  # of all its commands, before the first
    folder = local_output(output or _OUTPUTS[real])
    began, seconds = time.monotonic(), list[tuple[str, float]]()
    run = running(say, seconds)
    report: DemoReport | RealDemoReport
    if real:
        model = cached_model(say)  # before anything is removed
        seconds.append(("model", round(time.monotonic() - began, 1)))
        clear(folder, overwrite)
        runs = RealSteps(folder, model, seed, limit, run).all(num_rollouts or NUM_ROLLOUTS)
        report = RealDemoReport.of(folder, runs, seed, seconds, round(time.monotonic() - began, 1))
        pages = {f"heldout-{name}": f"report-{name}.html" for name in report.policies}
    else:
        clear(folder, overwrite)
        runs, jobs = _Commands(folder, seed, limit, run).all(rounds, num_rollouts or OWN_ROLLOUTS, judged_groups)
        before, pages = folder / "heldout-before", {"heldout-after": "report.html"}
        summary = summarise(before, folder / "heldout-after", runs, jobs)
        judged = summarise_judged(before, folder / "heldout-judged", runs[0]) if judged_groups else None
        report = DemoReport(folder, **summary, judged=judged, seconds=round(time.monotonic() - began, 1))
    write_text(folder / "summary.json", json.dumps(report.to_dict(), indent=2) + "\n")
    for after, page in pages.items():
        write_page(folder / "heldout-before", folder / after, output=folder / page)
    if threshold:
        report.require_rise()
    return report


def planned(output: str | Path | None, settings: DemoConfig, *, overwrite: bool = False) -> DemoPlan:
    """The plan of ``demo``, without running it.

    Raises StoreError for an output folder that ``demo`` would refuse, and DataError for a shipped file that is missing.
    """
    real, seed, limit = settings.real, settings.seed, settings.limit
    folder = Path(output or _OUTPUTS[real])
    refuse_foreign(folder, overwrite)
    steps = list[list[str]]()

    def keep(command: Sequence[str], _: Collection[int]) -> None:
        steps.append(["gymdata", *command])

    if real:
        RealSteps(folder, cached_folder(), seed, limit, keep).all(settings.num_rollouts or NUM_ROLLOUTS)
    else:
        rollouts = settings.num_rollouts or OWN_ROLLOUTS
        _Commands(folder, seed, limit, keep).all(settings.rounds, rollouts, settings.judged_groups)
    words = dict.fromkeys(word.partition(":")[0] for step in steps for word in step)
    reads = [Path(word) for word in words if Path(word).is_relative_to(sample_data())]
    for path in reads:
        if not path.exists():
            raise DataError.missing_path(path, "a file that is installed with gymdata")
    install = None
    try:
        require(*NEEDED)
        if real:
            require_model()
    except UsageError as error:
        install = error.hint
    return DemoPlan([shlex.join(step) for step in steps], [str(path) for path in reads], install)


def summarise(before: Path, after: Path, runs: list[Path], jobs: list[Path]) -> Figures:
    """The demo's figures, recomputed from sealed runs: held-out rates with Wilson intervals, and their paired difference."""
    sampled, breaks = tokens_and_breaks([before, *runs, after])
    trained = [read_run_json(job)["trained_tokens"]["batches"]["count"] for job in jobs]
    return {
        **rise(before, after),
        "tokens_sampled": sampled,
        "tokens_trained": sum(trained),
        "pairs": sum(read_run_json(job)["counts"]["pairs"] for job in jobs),
        "breaks": breaks,
    }


def summarise_judged(before: Path, after: Path, run: Path) -> Figures:
    """The same for pairs from comparisons, with the judge's accuracy against the rewards, by the better one's
    position, and its bias report."""
    judged, job = run / f"judge-{JUDGE}", run.parent / "judged-policy"
    facts = read_run_json(judged)
    rollouts = read_table(run, columns=["rollout_id", "reward"])
    number = {rollout: n for n, rollout in enumerate(rollouts["rollout_id"].to_pylist())}
    matches = matches_in(read_table(judged, COMPARISONS, MATCH_COLUMNS), number)
    return {
        **rise(before, after),
        "groups": facts["counts"]["groups"],
        "comparisons": facts["counts"]["comparisons"],
        "accuracy": against_rewards(matches, rollouts["reward"].to_numpy()),
        "bias": facts["bias"],
        "tokens_trained": read_run_json(job)["trained_tokens"]["batches"]["count"],
        "pairs": read_run_json(job)["counts"]["pairs"],
    }


class _Commands(Steps):
    """The steps of the demo of the sample policy."""

    def all(self, rounds: int, num_rollouts: int, judged_groups: int) -> tuple[list[Path], list[Path]]:
        """Every step, in order; the folders of rollouts and of trained policies of the rounds."""
        base = self.data / "policy"
        self.held_out("heldout-before", base)
        policy, runs, jobs = base, list[Path](), list[Path]()
        for number in range(1, rounds + 1):
            run = self.folder / f"round-{number}" / "rollouts"
            flags = ["-r", str(num_rollouts), "--seed", str(self.seed * 1000 + number)]
            self.collect("train", policy, run, flags)
            self.run("validate", str(run), "--quiet")
            runs.append(run)
            policy = self._train(policy, run, "pairs", "policy")
            jobs.append(policy)
        self.held_out("heldout-after", policy)
        if judged_groups:
            self.held_out("heldout-judged", self.judge(base, runs[0], judged_groups))
        return runs, jobs

    def judge(self, policy: Path, run: Path, groups: int) -> Path:
        """The policy from pairs on which the judge's comparisons agree in both positions; those that failed are counted."""
        judge = ("--genrm", str(self.data / "genrm"), "--name", JUDGE, "--show", "transcript", "--max-tokens", "64")
        fine = (EXIT_OK, EXIT_FAULTS)
        self.run("judge", str(run), *judge, "-n", str(groups), "--seed", str(self.seed), fine=fine)
        return self._train(policy, run, "judged-pairs", "judged-policy", "--from", "comparisons")

    def _train(self, policy: Path, run: Path, pairs: str, out: str, *source: str) -> Path:
        pairs_folder, policy_folder = run.parent / pairs, run.parent / out
        drawn = ("--strategy", "all", "--max-pairs-per-task", "4", "--seed", str(self.seed))
        self.run("pairs", str(run), "-o", str(pairs_folder), *source, *drawn)
        config = ("--config", str(self.data / "dpo.yaml"), "--set", f"seed={self.seed}")
        self.run("train-dpo", str(pairs_folder), "-m", str(policy), "-o", str(policy_folder), *config)
        return policy_folder
