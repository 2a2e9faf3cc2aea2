"""What demos have in common: their steps as command lines over one output folder, and the figures of held-out runs.

Invariants: every step is a command that a user could type, run as a process of its own, so that engine and trainer
never hold the machine together; the figures are recomputed from the sealed held-out runs and from nothing else.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from gymdata.errors import EXIT_INTERRUPTED, EXIT_OK, GymdataError, RefusedError, StoreError
from gymdata.public import Figures, Row, rate_text
from gymdata.stats import paired_difference_ci, wilson
from gymdata.store import scan_lazy
from gymdata.workers import python_module
from gymdata.workers.signals import sigterm_interrupts

#: The improvement that a demo must show: held-out rate, after minus before.
MIN_RISE = 0.10
#: Extras, and what they install.
NEEDED = ("train,engine", "vllm", "transformers", "torch", "trl", "peft", "datasets", "accelerate")
#: The output of a demo's first step, which marks a folder as the demo's.
_FIRST = "heldout-before"
#: The names of what demos write into their folder, with what a killed one leaves of a file.
OUTPUTS = re.compile(
    r"heldout-(before|after|judged|sft|dpo|rl)|round-\d+|rollouts|pairs|experiences|sft|dpo|rl"
    r"|\.?(summary\.json|report(-(sft|dpo|rl))?\.html)(\.tmp)?"
)

Run = Callable[[Sequence[str], Collection[int]], None]


def sample_data() -> Path:
    """The folder of tasks, policy and environment that is installed with gymdata."""
    return Path(str(files("gymdata.sample_data")))


class Steps:
    """A demo's steps as command lines over one output folder. ``run`` gets each: its words after ``gymdata``, and the
    exit codes that are fine."""

    #: The beginning of the names of the task files.
    tasks = ""

    def __init__(self, folder: Path, seed: int, limit: int | None, run: Run) -> None:
        self.folder, self.data, self.seed, self._call = folder, sample_data(), seed, run
        self._limit = ["-n", str(limit)] if limit else []
        self.scored = ["--env", f"{self.data / 'calculator.py'}:Calculator", "--reward", "numeric"]

    def held_out(self, name: str, policy: Path) -> None:
        greedy = ["--temperature", "0", "-r", "1", "--seed", str(self.seed)]
        self.collect("heldout", policy, self.folder / name, greedy)

    def collect(self, tasks: str, policy: Path, run: Path, flags: Sequence[str]) -> None:
        file = self.data / "tasks" / f"{self.tasks}{tasks}.jsonl"
        self.run("collect", str(file), "-m", str(policy), "-o", str(run), *self.scored, "--max-tokens", "48", *flags,
                 *self._limit)  # fmt: skip

    def run(self, *command: str, fine: Collection[int] = (EXIT_OK,)) -> None:
        self._call(command, fine)


def running(say: Callable[[str], None], seconds: list[tuple[str, float]] | None = None) -> Run:
    """Runs each command as a process, announced by ``say``; ``seconds`` gets the name and the time of each."""

    def run(command: Sequence[str], fine: Collection[int]) -> None:
        say(f"$ gymdata {shlex.join(command)}")
        began = time.monotonic()
        with sigterm_interrupts():  # else the command would go on alone
            done = subprocess.run([*python_module("gymdata.cli"), *command], stdout=sys.stderr, check=False)
        if done.returncode not in fine:
            error = GymdataError(
                f"`gymdata {command[0]}` ended with exit code {done.returncode}; see its output above",
                hint=f"gymdata {shlex.join(command)}",
            )
            error.exit_code = done.returncode if done.returncode > 0 else EXIT_INTERRUPTED
            raise error
        if seconds is not None:
            seconds.append((command[0], round(time.monotonic() - began, 1)))

    return run


def rise(before: Path, after: Path) -> Figures:
    """The rates of two held-out runs with their Wilson intervals, and the paired difference with its interval."""
    first, last = _correct_by_task(before), _correct_by_task(after)
    tasks = sorted(first.keys() & last.keys())
    mean, low, high = paired_difference_ci([first[t] for t in tasks], [last[t] for t in tasks])
    return {"before": _rate(first), "after": _rate(last), "difference": {"rate": mean, "ci95": [low, high]}}


def tokens_and_breaks(runs: Sequence[Path]) -> tuple[int, ...]:
    """The sums over all rollouts of the runs."""
    import polars as pl

    columns = pl.col("n_generated_tokens", "n_breaks").cast(pl.Int64)
    return pl.concat([scan_lazy(run).select(columns) for run in runs]).sum().collect(engine="streaming").row(0)


def shown_rise(after: Figures, difference: Figures, which: str) -> list[Row]:
    return [
        (f"{which}held-out after", f"{rate_text(after)}, {after['successes']} of {after['n']}"),
        (f"{which}improvement", rate_text(difference).replace(" %", " points", 1)),
    ]


def require_rise(difference: Figures, how: str, folder: Path, least_low: float = 0) -> None:
    """Raises RefusedError unless the rate rose by MIN_RISE, and its interval is above ``least_low``."""
    rose, (low, _) = difference["rate"], difference["ci95"]
    if rose < MIN_RISE or low <= least_low:
        above = f"{100 * least_low:.0f} points" if least_low else "zero"
        raise RefusedError(
            f"{how}, the held-out rate rose by {100 * rose:.1f} points (95 % interval from {100 * low:.1f}), "
            f"expected at least {100 * MIN_RISE:.0f} with the interval above {above}",
            hint=f"{folder / 'summary.json'} has the figures; the runs beside it can be queried",
        )


def _correct_by_task(run: Path) -> dict[str, float]:
    import polars as pl

    correct = (pl.col("reward") == 1.0).fill_null(False).cast(pl.Float64)
    return dict(scan_lazy(run).select("task_id", correct).collect().iter_rows())


def _rate(correct: Mapping[str, float]) -> Figures:
    n, right = len(correct), int(sum(correct.values()))
    low, high = wilson(right, n)
    return {"n": n, "successes": right, "rate": right / n, "ci95": [low, high]}


def clear(folder: Path, overwrite: bool, outputs: re.Pattern[str] = OUTPUTS) -> None:
    """Make the output folder, or empty a demo's own with ``overwrite``. Raises as ``refuse_foreign``."""
    refuse_foreign(folder, overwrite, outputs)
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        # What marks it as the demo's is removed last, so that the same command finishes an interrupted removal.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == _FIRST):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def refuse_foreign(folder: Path, overwrite: bool, outputs: re.Pattern[str] = OUTPUTS) -> None:
    """Raises StoreError for a folder that the demo did not make, and with ``overwrite`` for one that holds anything besides
    its ``outputs``."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if names and _FIRST not in names:
        raise StoreError(f"{folder}: is not empty and was not made by the demo", hint="give another output folder")
    foreign = [name for name in names if not outputs.fullmatch(name)]
    if foreign and overwrite:
        raise StoreError(
            f"{folder}: contains {', '.join(foreign[:3])}, which the demo did not write",
            hint="move it out, or give another output folder",
        )
