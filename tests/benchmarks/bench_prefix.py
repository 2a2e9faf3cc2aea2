"""Prompts that a batch shares, run once: train-rl, train-dpo and train-sft against themselves without it and against stock
trainers, and what audit and reference scoring gain on rollouts of the shipped policy.

Every race is of equal work: the losses (or scores) of the sides are compared first.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.commands.demo.run import sample_data
from tests.benchmarks import bench_train
from tests.benchmarks.bench_train import PLAIN, Shape, Sides, model_folder, started
from tests.benchmarks.rows import Row, interleave, seconds

SHARED = Shape("8 x 100 tokens after 1,000", prompts=2, siblings=8, prompt=(1_000, 1_001), answer=(100, 101), batch=8)
#: Of the demo's files only the batch is chosen.
DEMO = Shape("the demo's rollouts, 32 a batch", prompts=0, siblings=0, prompt=(0, 0), answer=(0, 0), batch=32)
RUNS = 3
#: A sampler that keeps the file's order: with it, batches and so losses are the same with and without sharing.
IN_ORDER = {"train_sampling_strategy": "sequential"}


#: The rival, what makes a file and its stock trainer, and what makes a stock trainer of a file that is there.
KINDS: dict[
    str, tuple[str, Callable[[Path, Path, Shape], Sides], Callable[[Path, Path, Shape, Path], bench_train.Stock]]
] = {
    "rl": ("a bare Trainer", bench_train.rl_sides, bench_train.rl_stock),
    "dpo": ("TRL's DPOTrainer", bench_train.dpo_sides, bench_train.dpo_stock),
    "sft": ("TRL's SFTTrainer", bench_train.sft_sides, bench_train.sft_stock),
}


def trainings(folder: Path, model: Path, kind: str, shape: Shape) -> Iterator[Row]:
    """A trainer against itself without sharing, and, where prompts are shared, against a stock trainer."""
    name, sides, _ = KINDS[kind]
    folder.mkdir()
    file, stock, _ = sides(folder, model, shape)
    what = f"train-{kind}, {shape.name}, against"

    def begun(mode: str, out: str) -> Any:
        own = {"select": "all"} if kind == "sft" else {}
        return started(kind, file, model, folder / out, shape, prefix_sharing=mode, **own, **IN_ORDER)

    bound = 2.0 if shape is SHARED else 0.97
    yield raced(f"{what} --prefix-sharing off", begun("on", "shared"), begun("off", "plain"), bound)
    if shape is SHARED:
        yield raced(f"{what} {name}", begun("on", "again"), stock(**IN_ORDER), bound)


def raced(what: str, ours: Any, rival: Any, at_least: float) -> Row:
    """Both trainings in turn, by CPU time, once their losses were found alike."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        bench_train.require_equal_losses(ours, rival)
        timing = interleave(ours.train, rival.train, RUNS)
    ratio = statistics.median(b / a for a, b in zip(timing.ours_cpu, timing.rival_cpu, strict=True))
    return Row(f"{what}, CPU time", seconds(timing.ours_cpu), seconds(timing.rival_cpu), ratio, at_least=at_least)


def gymdata(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "gymdata.cli", *map(str, words)], check=True, stdout=sys.stderr)


def collected(folder: Path) -> Path:
    """Rollouts of the shipped policy, made as the demo's first round makes them, eight for each of 150 tasks."""
    samples = sample_data()
    scored = ["--env", f"{samples / 'calculator.py'}:Calculator", "--reward", "numeric", "--max-tokens", 48]
    files = [samples / "tasks" / "train.jsonl", "-m", samples / "policy", "-o", folder / "rollouts"]
    gymdata("collect", *files, *scored, "-n", 150, "-r", 8)
    return folder / "rollouts"


def demo_trainings(folder: Path, run: Path) -> Iterator[Row]:
    """Our trainers on what the demo trains from, the sample policy, against themselves without sharing and stock ones."""
    gymdata("experience", run, "-o", folder / "experiences")
    gymdata("pairs", run, "-o", folder / "pairs", "--strategy", "all", "--max-pairs-per-task", 4)
    files = {
        "rl": folder / "experiences" / "experiences.parquet",
        "dpo": folder / "pairs" / "pairs.parquet",
        "sft": run,
    }
    model = sample_data() / "policy"
    for kind, file in files.items():
        # A stock trainer trains what it gets, also twice.
        own = IN_ORDER | ({"select": "all", "keep_duplicates": True} if kind == "sft" else {})

        def begun(mode: str, out: str, kind: str = kind, file: Path = file, own: Mapping[str, Any] = own) -> Any:
            return started(kind, file, model, folder / f"{kind}-{out}", DEMO, prefix_sharing=mode, **own)

        rival, _, stock_of = KINDS[kind]
        what = f"train-{kind}, {DEMO.name}, against"
        yield raced(f"{what} --prefix-sharing off", begun("on", "shared"), begun("off", "plain"), 0.97)
        stock, _ = stock_of(file, model, DEMO, folder / f"{kind}-stock")
        yield raced(f"{what} {rival}", begun("on", "again"), stock(**IN_ORDER), 0.97)


def scoring(run: Path) -> Row:
    """The forward passes of ``audit`` and of reference scoring over the rollouts of ``run``."""
    from gymdata.models._torch import ForwardPolicy, Place
    from gymdata.models.scoring import ToScore
    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.rollouts.sequences import stitch
    from gymdata.store import read_table

    table = read_table(run, ROLLOUTS, columns=("rollout_id", "turns", "temperature"))
    sequences = stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    given = ToScore.of(sequences, table["temperature"].to_numpy())
    shared, plain = (ForwardPolicy(Place(str(sample_data() / "policy")), sharing=mode) for mode in ("auto", "off"))
    found, expected = shared.log_probs(given)[0], plain.log_probs(given)[0]
    if not np.allclose(found, expected, atol=1e-4):
        raise RuntimeError(f"scores differ by up to {np.abs(found - expected).max()}")
    timing = interleave(lambda: shared.log_probs(given), lambda: plain.log_probs(given), RUNS)
    ratio = statistics.median(b / a for a, b in zip(timing.ours_cpu, timing.rival_cpu, strict=True))
    what = f"audit's and reference scoring of {len(given):,} rollouts of the demo, against without sharing, CPU time"
    return Row(what, seconds(timing.ours_cpu), seconds(timing.rival_cpu), ratio, at_least=1.5)


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_folder(folder / "model")
        rows = [
            row
            for shape in (SHARED, PLAIN)
            for kind in KINDS
            for row in trainings(folder / f"{kind}-{shape.siblings}", model, kind, shape)
        ]
        run = collected(folder)
        return [*rows, *demo_trainings(folder, run), scoring(run)]
