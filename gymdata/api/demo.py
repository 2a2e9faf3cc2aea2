"""The main job on the shipped policy and tasks: measure, (collect, validate, pairs, train-dpo) a few times, measure again.

What always holds: every step is a command that a user could type, run as a process of its own, so that engine and trainer
never hold the machine together; the figures are recomputed from the sealed held-out runs and from nothing else.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from gymdata.core.stats import paired_difference_ci, wilson
from gymdata.errors import EXIT_INTERRUPTED, GymdataError, RefusedError, StoreError
from gymdata.store import read_run_json, read_table

#: The rise that the demo must show: held-out rate, after minus before.
MIN_RISE = 0.10
#: The unseeded default of the demo is a seed too, so that two people see the same figures.
DEFAULT_SEED = 0

_HELD_OUT = ["--temperature", "0", "-r", "1"]


def sample_data() -> Path:
    """The folder of tasks, policy and environment that is installed with gymdata."""
    return Path(str(files("gymdata_sample_data")))


def demo(
    output: str | Path = "runs/demo",
    *,
    rounds: int = 2,
    num_rollouts: int = 8,
    limit: int | None = None,
    seed: int = DEFAULT_SEED,
    threshold: bool = True,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the main job and return what ``OUTPUT/summary.json`` holds.

    ``limit`` takes only so many tasks of each file. With ``threshold``, raises RefusedError unless the held-out rate rose
    by at least 10 points and the paired 95 % interval of the rise is above zero.
    """
    folder = Path(output)
    _clear(folder, overwrite)
    began = time.monotonic()
    run = _Commands(folder, sample_data(), seed, limit, say)

    run.held_out("heldout-before", run.data / "policy")
    policy, runs, jobs = run.data / "policy", [], []
    for number in range(1, rounds + 1):
        runs.append(run.collect(number, policy, num_rollouts))
        policy = run.train(policy, runs[-1])
        jobs.append(policy)
    run.held_out("heldout-after", policy)

    summary = summarise(folder / "heldout-before", folder / "heldout-after", runs, jobs)
    summary["seconds"] = round(time.monotonic() - began, 1)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if threshold:
        _require_rise(summary, folder)
    return summary


def summarise(before: Path, after: Path, runs: list[Path], jobs: list[Path]) -> dict[str, Any]:
    """The demo's figures, recomputed from sealed runs: held-out rates with Wilson intervals, and their paired difference."""
    first, last = _correct_by_task(before), _correct_by_task(after)
    tasks = sorted(first.keys() & last.keys())
    mean, low, high = paired_difference_ci([first[t] for t in tasks], [last[t] for t in tasks])
    counts = [read_table(run, columns=["n_generated_tokens", "n_breaks"]) for run in [before, *runs, after]]
    trained = [read_run_json(job)["trained_tokens"]["batches"]["count"] for job in jobs]
    return {
        "before": _rate(first),
        "after": _rate(last),
        "difference": {"rate": mean, "ci95": [low, high]},
        "tokens_sampled": sum(int(pc.sum(t["n_generated_tokens"]).as_py() or 0) for t in counts),
        "tokens_trained": sum(trained),
        "pairs": sum(read_run_json(job)["counts"]["pairs"] for job in jobs),
        "breaks": sum(int(pc.sum(t["n_breaks"]).as_py() or 0) for t in counts),
    }


class _Commands:
    """The demo's steps as command lines over one output folder."""

    def __init__(self, folder: Path, data: Path, seed: int, limit: int | None, say: Callable[[str], None]) -> None:
        self.folder, self.data, self.seed, self.say = folder, data, seed, say
        self._limit = ["-n", str(limit)] if limit else []
        self._scored = ["--env", f"{data / 'calculator.py'}:Calculator", "--reward", "numeric", "--max-tokens", "48"]

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
        pairs, out = run.parent / "pairs", run.parent / "policy"
        self._run("pairs", str(run), "-o", str(pairs), "--strategy", "all", "--max-pairs-per-task", "4",
                  "--seed", str(self.seed))  # fmt: skip
        self._run("train-dpo", str(pairs), "-m", str(policy), "-o", str(out),
                  "--config", str(self.data / "dpo.yaml"), "--set", f"seed={self.seed}")  # fmt: skip
        return out

    def _collect(self, tasks: Path, policy: Path, run: Path, flags: list[str]) -> None:
        self._run("collect", str(tasks), "-m", str(policy), "-o", str(run), *self._scored, *flags, *self._limit)

    def _run(self, *command: str) -> None:
        self.say(f"$ gymdata {shlex.join(command)}")
        done = subprocess.run([sys.executable, "-m", "gymdata_cli", *command], stdout=sys.stderr, check=False)
        if done.returncode:
            error = GymdataError(
                f"`gymdata {command[0]}` ended with exit code {done.returncode}; what it said is above",
                hint=f"gymdata {shlex.join(command)}",
            )
            error.exit_code = done.returncode if done.returncode > 0 else EXIT_INTERRUPTED
            raise error


def _correct_by_task(run: Path) -> dict[str, float]:
    table = read_table(run, columns=["task_id", "reward"])
    return {t: float(r == 1.0) for t, r in zip(*(table[c].to_pylist() for c in ("task_id", "reward")), strict=True)}


def _rate(correct: Mapping[str, float]) -> dict[str, Any]:
    n, right = len(correct), int(sum(correct.values()))
    low, high = wilson(right, n)
    return {"n": n, "correct": right, "rate": right / n, "ci95": [low, high]}


def _clear(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        return
    ours = (folder / "summary.json").exists() or (folder / "heldout-before").exists()
    if overwrite and ours:
        shutil.rmtree(folder)
        folder.mkdir(parents=True)
    elif not ours:
        raise StoreError(f"{folder}: is not empty and was not made by the demo", hint="give another -o")


def _require_rise(summary: Mapping[str, Any], folder: Path) -> None:
    rise, (low, _) = summary["difference"]["rate"], summary["difference"]["ci95"]
    if rise < MIN_RISE or low <= 0:
        raise RefusedError(
            f"the held-out rate rose by {100 * rise:.1f} points (95 % interval from {100 * low:.1f}), "
            f"expected at least {100 * MIN_RISE:.0f} with the interval above zero",
            hint=f"{folder / 'summary.json'} has the figures; the runs beside it can be queried",
        )
