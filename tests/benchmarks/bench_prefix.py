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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import bench_train
from tests.benchmarks.bench_train import PLAIN, Shape, Sides, model_folder, started
from tests.benchmarks.rows import Row, interleave, seconds

SHARED = Shape("8 x 100 tokens after 1,000", prompts=2, siblings=8, prompt=(1_000, 1_001), answer=(100, 101), batch=8)
RUNS = 3
#: A sampler that keeps the file's order: with it, batches and so losses are the same with and without sharing.
IN_ORDER = {"train_sampling_strategy": "sequential"}


KINDS: dict[str, tuple[str, Callable[[Path, Path, Shape], Sides]]] = {
    "rl": ("a bare Trainer", bench_train.rl_sides),
    "dpo": ("TRL's DPOTrainer", bench_train.dpo_sides),
    "sft": ("TRL's SFTTrainer", bench_train.sft_sides),
}


def trainings(folder: Path, model: Path, kind: str, shape: Shape) -> Iterator[Row]:
    """A trainer against itself without sharing, and, where prompts are shared, against a stock trainer."""
    name, sides = KINDS[kind]
    folder.mkdir()
    file, stock, _ = sides(folder, model, shape)
    what = f"train-{kind}, {shape.name}, against"

    def begun(mode: str, out: str) -> Any:
        own = {"select": "all"} if kind == "sft" else {}
        return started(kind, file, model, folder / out, shape, prefix_sharing=mode, **own, **IN_ORDER)

    bound = 2.0 if shape is SHARED else 0.97
    yield raced(f"{what} --prefix-sharing off", begun("auto", "shared"), begun("off", "plain"), bound)
    if shape is SHARED:
        yield raced(f"{what} {name}", begun("auto", "again"), stock(**IN_ORDER), bound)


def raced(what: str, ours: Any, rival: Any, at_least: float) -> Row:
    """Both trainings in turn, by CPU time, once their losses were found alike."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        bench_train.require_equal_losses(ours, rival)
        timing = interleave(ours.train, rival.train, RUNS)
    ratio = statistics.median(b / a for a, b in zip(timing.ours_cpu, timing.rival_cpu, strict=True))
    return Row(f"{what}, CPU time", seconds(timing.ours_cpu), seconds(timing.rival_cpu), ratio, at_least=at_least)


def scoring(folder: Path) -> Row:
    """The forward passes of ``audit`` and of reference scoring over rollouts of the shipped policy, made as the demo's first
    round makes them, eight for each of 150 tasks."""
    from gymdata.demo.run import sample_data
    from gymdata.engines._torch import ForwardPolicy, Place
    from gymdata.engines.scoring import ToScore
    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.rollouts.sequences import stitch
    from gymdata.store import read_table

    samples, run = sample_data(), folder / "rollouts"
    command = ["collect", samples / "tasks" / "train.jsonl", "-m", samples / "policy", "-o", run, "-n", 150, "-r", 8]
    command += ["--env", f"{samples / 'calculator.py'}:Calculator", "--reward", "numeric", "--max-tokens", 48]
    subprocess.run([sys.executable, "-m", "gymdata.cli", *map(str, command)], check=True, stdout=sys.stderr)
    table = read_table(run, ROLLOUTS, columns=("rollout_id", "turns", "temperature"))
    sequences = stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    given = ToScore.of(sequences, table["temperature"].to_numpy())
    shared, plain = (ForwardPolicy(Place(str(samples / "policy")), sharing=mode) for mode in ("auto", "off"))
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
        return [*rows, scoring(folder)]
