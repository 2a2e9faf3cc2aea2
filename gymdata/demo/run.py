"""The main job on the shipped policy and tasks: measure, (collect, validate, pairs, train-dpo) a few times, measure again.

Also one round from the same first rollouts whose pairs come from the shipped judge, which never sees a reward.
Invariants: every step is a command that a user could type, run as a process of its own, so that engine and trainer
never hold the machine together; the figures are recomputed from the sealed held-out runs and from nothing else.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pydantic

from gymdata.errors import (
    EXIT_FAULTS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    DataError,
    GymdataError,
    RefusedError,
    StoreError,
    UsageError,
    require,
)
from gymdata.genrm.bias import against_rewards
from gymdata.judge.groups import MATCH_COLUMNS, matches_in
from gymdata.public import Report, Row, rate_text
from gymdata.report.run import report as write_page
from gymdata.rollouts.schema import COMPARISONS
from gymdata.settings import Config
from gymdata.stats import paired_difference_ci, wilson
from gymdata.store import read_run_json, read_table, scan_lazy
from gymdata.store.paths import local_output
from gymdata.store.run_json import replacing

#: The improvement that the demo must show: held-out rate, after minus before.
MIN_RISE = 0.10
#: The unseeded default of the demo is a seed too, so that two people see the same figures.
DEFAULT_SEED = 0
#: Enough for the judged improvement to be clear, and few enough for a short demo: 56 comparisons each.
JUDGED_GROUPS = 300
JUDGE = "genrm"
#: Files that only a demo writes: its first step's output, and its figures.
_OURS = ("heldout-before", "summary.json")


class DemoConfig(Config):
    """The keywords of ``gymdata.demo`` that a command line gives."""

    rounds: int = pydantic.Field(2, ge=1, description="Rounds of collect, pairs and train-dpo.")
    num_rollouts: int = pydantic.Field(8, ge=2, description="Rollouts per training task.")
    limit: int | None = pydantic.Field(None, ge=1, description="Use only the first N tasks.")
    judged_groups: int = pydantic.Field(
        JUDGED_GROUPS, ge=0, description="Groups compared by the judge; 0 disables the judge."
    )
    seed: int = pydantic.Field(DEFAULT_SEED, description="Random seed.")
    threshold: bool = pydantic.Field(True, description="Fail unless held-out accuracy improves by 10 points.")


#: Extras, and what they install.
_NEEDED = ("train,engine", "vllm", "transformers", "torch", "trl", "peft", "datasets", "accelerate")
_Run = Callable[[Sequence[str], Collection[int]], None]
_HELD_OUT = ["--temperature", "0", "-r", "1"]


@dataclass(frozen=True, slots=True, repr=False)
class DemoReport(Report):
    """The content of ``OUTPUT/summary.json``: held-out rates ``before`` and ``after`` with their Wilson intervals, the
    paired ``difference``, and ``judged``: the same where pairs come from the judge (None without one)."""

    output: Path
    before: dict[str, Any]
    after: dict[str, Any]
    difference: dict[str, Any]
    tokens_sampled: int
    tokens_trained: int
    pairs: int
    breaks: int
    judged: dict[str, Any] | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        whole = asdict(self)
        return {k: v for k, v in whole.items() if k != "output" and (k != "judged" or v is not None)}

    def rows(self) -> list[Row]:
        return [
            ("held-out before", f"{rate_text(self.before)}, {self.before['successes']} of {self.before['n']}"),
            *_shown_rise(self.after, self.difference, ""),
            ("tokens sampled", self.tokens_sampled),
            ("tokens trained", self.tokens_trained),
            ("pairs", self.pairs),
            ("breaks", self.breaks),
            *(_shown_judged(self.judged) if self.judged else []),
            ("seconds", self.seconds),
            ("written to", self.output / "summary.json"),
            ("report", self.output / "report.html"),
        ]


def _shown_judged(judged: Mapping[str, Any]) -> list[Row]:
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
        *_shown_rise(judged["after"], judged["difference"], "judged: "),
        ("judged: comparisons", f"{sum(counts.values()):,}, {counts['judged']:,} judged"),
        *((f"judged: {name}", rate_text(part)) for name, part in rates.items() if part["n"]),
        ("judged: pairs", judged["pairs"]),
    ]


def _shown_rise(after: Mapping[str, Any], difference: Mapping[str, Any], which: str) -> list[Row]:
    return [
        (f"{which}held-out after", f"{rate_text(after)}, {after['successes']} of {after['n']}"),
        (f"{which}improvement", rate_text(difference).replace(" %", " points", 1)),
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


def sample_data() -> Path:
    """The folder of tasks, policy and environment that is installed with gymdata."""
    return Path(str(files("gymdata.sample_data")))


def demo(
    output: str | Path = "runs/demo",
    *,
    rounds: int = 2,
    num_rollouts: int = 8,
    limit: int | None = None,
    judged_groups: int = JUDGED_GROUPS,
    seed: int = DEFAULT_SEED,
    threshold: bool = True,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> DemoReport:
    """Run the main job; what it measured is also in ``OUTPUT/summary.json``.

    ``limit`` takes only the first N tasks of each file; ``judged_groups``: in how many groups the judge compares
    rollouts (0: no judge). With ``threshold``, raises RefusedError unless the held-out rate rose by at least 10 points, both
    ways, and the paired 95 % interval of the rise is above zero.
    """
    require(*_NEEDED)  # of all its commands, before the first
    folder = local_output(output)
    _clear(folder, overwrite)
    began = time.monotonic()

    def run(command: Sequence[str], fine: Collection[int]) -> None:
        say(f"$ gymdata {shlex.join(command)}")
        done = subprocess.run([sys.executable, "-m", "gymdata.cli", *command], stdout=sys.stderr, check=False)
        if done.returncode not in fine:
            error = GymdataError(
                f"`gymdata {command[0]}` ended with exit code {done.returncode}; see its output above",
                hint=f"gymdata {shlex.join(command)}",
            )
            error.exit_code = done.returncode if done.returncode > 0 else EXIT_INTERRUPTED
            raise error

    runs, jobs = _Commands(folder, sample_data(), seed, limit, run).all(rounds, num_rollouts, judged_groups)

    summary = summarise(folder / "heldout-before", folder / "heldout-after", runs, jobs)
    judged = None
    if judged_groups:
        judged = summarise_judged(folder / "heldout-before", folder / "heldout-judged", runs[0])
    report = DemoReport(folder, **summary, judged=judged, seconds=round(time.monotonic() - began, 1))
    with replacing(folder / "summary.json") as temporary:
        temporary.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    write_page(folder / "heldout-before", folder / "heldout-after", output=folder / "report.html")
    if threshold:
        _require_rise(summary, "with pairs from rewards", folder)
    if threshold and judged is not None:
        _require_rise(judged, "with pairs from comparisons", folder)
    return report


def planned(
    output: str | Path = "runs/demo",
    *,
    rounds: int = 2,
    num_rollouts: int = 8,
    limit: int | None = None,
    judged_groups: int = JUDGED_GROUPS,
    seed: int = DEFAULT_SEED,
) -> DemoPlan:
    """The plan of ``demo``, without running it.

    Raises StoreError for an output folder that ``demo`` would refuse, and DataError for a shipped file that is missing.
    """
    _refuse_foreign(Path(output))
    data, steps = sample_data(), list[list[str]]()

    def keep(command: Sequence[str], _: Collection[int]) -> None:
        steps.append(["gymdata", *command])

    _Commands(Path(output), data, seed, limit, keep).all(rounds, num_rollouts, judged_groups)
    words = dict.fromkeys(word.removesuffix(":Calculator") for step in steps for word in step)
    reads = [Path(word) for word in words if Path(word).is_relative_to(data)]
    for path in reads:
        if not path.exists():
            raise DataError.missing_path(path, "a file that is installed with gymdata")
    install = None
    try:
        require(*_NEEDED)
    except UsageError as error:
        install = error.hint
    return DemoPlan([shlex.join(step) for step in steps], [str(path) for path in reads], install)


def summarise(before: Path, after: Path, runs: list[Path], jobs: list[Path]) -> dict[str, Any]:
    """The demo's figures, recomputed from sealed runs: held-out rates with Wilson intervals, and their paired difference."""
    import polars as pl

    columns = pl.col("n_generated_tokens", "n_breaks").cast(pl.Int64)
    every = pl.concat([scan_lazy(run).select(columns) for run in (before, *runs, after)])
    sampled, breaks = every.sum().collect(engine="streaming").row(0)
    trained = [read_run_json(job)["trained_tokens"]["batches"]["count"] for job in jobs]
    return {
        **_rise(before, after),
        "tokens_sampled": sampled,
        "tokens_trained": sum(trained),
        "pairs": sum(read_run_json(job)["counts"]["pairs"] for job in jobs),
        "breaks": breaks,
    }


def summarise_judged(before: Path, after: Path, run: Path) -> dict[str, Any]:
    """The same for pairs from comparisons, with the judge's accuracy against the rewards, by the better one's
    position, and its bias report."""
    judged, job = run / f"judge-{JUDGE}", run.parent / "judged-policy"
    facts = read_run_json(judged)
    rollouts = read_table(run, columns=["rollout_id", "reward"])
    number = {rollout: n for n, rollout in enumerate(rollouts["rollout_id"].to_pylist())}
    matches = matches_in(read_table(judged, COMPARISONS, MATCH_COLUMNS), number)
    return {
        **_rise(before, after),
        "groups": facts["counts"]["groups"],
        "comparisons": facts["counts"]["comparisons"],
        "accuracy": against_rewards(matches, rollouts["reward"].to_numpy()),
        "bias": facts["bias"],
        "tokens_trained": read_run_json(job)["trained_tokens"]["batches"]["count"],
        "pairs": read_run_json(job)["counts"]["pairs"],
    }


def _rise(before: Path, after: Path) -> dict[str, Any]:
    first, last = _correct_by_task(before), _correct_by_task(after)
    tasks = sorted(first.keys() & last.keys())
    mean, low, high = paired_difference_ci([first[t] for t in tasks], [last[t] for t in tasks])
    return {"before": _rate(first), "after": _rate(last), "difference": {"rate": mean, "ci95": [low, high]}}


class _Commands:
    """The demo's steps as command lines over one output folder. ``run`` gets each: its words after ``gymdata``, and the
    exit codes that are fine."""

    def __init__(self, folder: Path, data: Path, seed: int, limit: int | None, run: _Run) -> None:
        self.folder, self.data, self.seed, self._call = folder, data, seed, run
        self._limit = ["-n", str(limit)] if limit else []
        self._scored = ["--env", f"{data / 'calculator.py'}:Calculator", "--reward", "numeric", "--max-tokens", "48"]

    def all(self, rounds: int, num_rollouts: int, judged_groups: int) -> tuple[list[Path], list[Path]]:
        """Every step, in order; the folders of rollouts and of trained policies of the rounds."""
        self.held_out("heldout-before", self.data / "policy")
        policy, runs, jobs = self.data / "policy", list[Path](), list[Path]()
        for number in range(1, rounds + 1):
            runs.append(self.collect(number, policy, num_rollouts))
            policy = self.train(policy, runs[-1])
            jobs.append(policy)
        self.held_out("heldout-after", policy)
        if judged_groups:
            self.held_out("heldout-judged", self.judge(self.data / "policy", runs[0], judged_groups))
        return runs, jobs

    def held_out(self, name: str, policy: Path) -> None:
        tasks = self.data / "tasks" / "heldout.jsonl"
        self._collect(tasks, policy, self.folder / name, [*_HELD_OUT, "--seed", str(self.seed)])

    def collect(self, number: int, policy: Path, num_rollouts: int) -> Path:
        run = self.folder / f"round-{number}" / "rollouts"
        seed = str(self.seed * 1000 + number)
        self._collect(self.data / "tasks" / "train.jsonl", policy, run, ["-r", str(num_rollouts), "--seed", seed])
        self._run("validate", str(run), "--quiet")
        return run

    def train(self, policy: Path, run: Path) -> Path:
        return self._train(policy, run, run.parent / "pairs", run.parent / "policy")

    def judge(self, policy: Path, run: Path, groups: int) -> Path:
        """The policy from pairs on which the judge's comparisons agree in both positions; those that failed are counted."""
        judge = ("--genrm", str(self.data / "genrm"), "--name", JUDGE, "--show", "transcript", "--max-tokens", "64")
        fine = (EXIT_OK, EXIT_FAULTS)
        self._run("judge", str(run), *judge, "-n", str(groups), "--seed", str(self.seed), fine=fine)
        return self._train(
            policy, run, run.parent / "judged-pairs", run.parent / "judged-policy", "--from", "comparisons"
        )

    def _train(self, policy: Path, run: Path, pairs: Path, out: Path, *source: str) -> Path:
        drawn = ("--strategy", "all", "--max-pairs-per-task", "4", "--seed", str(self.seed))
        self._run("pairs", str(run), "-o", str(pairs), *source, *drawn)
        config = ("--config", str(self.data / "dpo.yaml"), "--set", f"seed={self.seed}")
        self._run("train-dpo", str(pairs), "-m", str(policy), "-o", str(out), *config)
        return out

    def _collect(self, tasks: Path, policy: Path, run: Path, flags: list[str]) -> None:
        self._run("collect", str(tasks), "-m", str(policy), "-o", str(run), *self._scored, *flags, *self._limit)

    def _run(self, *command: str, fine: Collection[int] = (EXIT_OK,)) -> None:
        self._call(command, fine)


def _correct_by_task(run: Path) -> dict[str, float]:
    import polars as pl

    correct = (pl.col("reward") == 1.0).fill_null(False).cast(pl.Float64)
    return dict(scan_lazy(run).select("task_id", correct).collect().iter_rows())


def _rate(correct: Mapping[str, float]) -> dict[str, Any]:
    n, right = len(correct), int(sum(correct.values()))
    low, high = wilson(right, n)
    return {"n": n, "successes": right, "rate": right / n, "ci95": [low, high]}


def _clear(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        return
    _refuse_foreign(folder)
    if overwrite:
        # The files that mark it as the demo's are removed last, so that the same command finishes an interrupted
        # removal.
        for path in sorted(folder.iterdir(), key=lambda path: path.name in _OURS):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _refuse_foreign(folder: Path) -> None:
    """A folder with anything in it that the demo did not make is left alone."""
    ours = any((folder / name).exists() for name in _OURS)
    if folder.exists() and any(folder.iterdir()) and not ours:
        raise StoreError(f"{folder}: is not empty and was not made by the demo", hint="give another output folder")


def _require_rise(figures: Mapping[str, Any], how: str, folder: Path) -> None:
    rise, (low, _) = figures["difference"]["rate"], figures["difference"]["ci95"]
    if rise < MIN_RISE or low <= 0:
        raise RefusedError(
            f"{how}, the held-out rate rose by {100 * rise:.1f} points (95 % interval from {100 * low:.1f}), "
            f"expected at least {100 * MIN_RISE:.0f} with the interval above zero",
            hint=f"{folder / 'summary.json'} has the figures; the runs beside it can be queried",
        )
