"""What the sampler's heads give and cost, on a model of yours (``GYMDATA_BENCH_MODEL=FOLDER``).

The ratio of the model to the sampler where ids were left out, as ``audit`` finds it: over the whole vocabulary, and
normalized over the kept sets that the saved heads are. And ``train-rl --score-centering`` with heads of 32 ids against the
same loss without, in CPU time and peak memory.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gymdata
from gymdata.commands.demo.steps import running, sample_data
from tests.benchmarks.bench_memory import peak_mb
from tests.benchmarks.bench_train import VOCABULARY, Shape, started
from tests.benchmarks.rows import Row, interleave, seconds

#: What is left out → the flags of ``collect``; the first leaves nothing out.
SAMPLED: Mapping[str, tuple[str, ...]] = {
    "nothing": ("--top-logprobs", "20"),
    "all but top_k 20": ("--top-k", "20", "--top-logprobs", "20"),
    "all but top_p 0.95 of top_k 20": ("--top-p", "0.95", "--top-k", "20", "--top-logprobs", "20"),
    "all but top_p 0.8 of top_k 64": ("--top-p", "0.8", "--top-k", "64", "--top-logprobs", "64"),
}
TASKS, ROLLOUTS, TOKENS = "8", "4", "64"
K, RUNS = 32, 5
SHAPE = Shape("2 steps of 4 answers of 50 tokens", prompts=8, siblings=1, prompt=(50, 51), answer=(50, 51), batch=4)


def ratios(folder: Path, model: Path) -> Iterator[Row]:
    """A run of each way to sample, audited: the figures over kept sets, and those over the whole vocabulary before."""
    run = running(lambda line: print(line, file=sys.stderr))
    for name, flags in SAMPLED.items():
        out = folder / name.replace(" ", "-")
        words = [sample_data() / "tasks" / "sentences-train.jsonl", "-m", model, "-o", out, "--temperature", "1"]
        run(
            ["collect", *map(str, words), "-n", TASKS, "-r", ROLLOUTS, "--max-tokens", TOKENS, "--seed", "1", *flags],
            (0,),
        )
        summary = gymdata.audit(out, str(model)).summary
        after = {"mean": summary["ratio"]["mean"]} | {k: summary[k] for k in ("share_outside", "effective_sample_size")}
        before = summary.get("before_kept_sets")
        shown = "no kept sets" if before is None else f"before: {figures(before)}"
        yield Row(f"ratio over {summary['tokens']:,} tokens, left out: {name}", figures(after), shown, after["mean"])


def figures(facts: Mapping[str, float]) -> str:
    outside, effective = facts["share_outside"], facts["effective_sample_size"]
    return f"mean {facts['mean']:.4f}, outside [0.9, 1.1] {outside:.2%}, ESS {effective:.1%}"


def with_heads(file: Path) -> Path:
    """Experiences with a random head of ``K`` ids at each trained token."""
    import pyarrow as pa

    from gymdata.rollouts.schema import EXPERIENCES
    from tests.rollout_files import write_table

    rng, rows = np.random.default_rng(0), []
    for i, (number, prompt, answer) in enumerate(SHAPE.drawn(rng)):
        pad, none = [0.0] * len(prompt), [[]] * len(prompt)
        heads = [rng.choice(VOCABULARY, K, replace=False).tolist() for _ in answer]
        logprobs = [np.log(rng.dirichlet(np.ones(K + 1))[:K]).tolist() for _ in answer]
        rows.append({
            "run_id": "r", "task_id": f"{number}", "group_id": f"{number}", "rollout_id": f"{i}", "sequence_index": 0,
            "input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer),
            "logprobs": pad + [-8.0] * len(answer), "turn_starts": [len(prompt)], "reward": 1.0,
            "advantages": pad + rng.normal(size=len(answer)).tolist(), "returns": pad + [1.0] * len(answer),
            "weight": 1.0, "temperature": 1.0, "policy_hash": "other", "policy_version": 0,
            "top_ids": none + heads, "top_log_probs": none + logprobs,
        })  # fmt: skip
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in rows[0]])
    return write_table(pa.Table.from_pylist(rows, schema=schema), file, EXPERIENCES)


def cost(folder: Path, model: Path, name: str) -> Row:
    """The training loops in turn, on the same file."""
    file = with_heads(folder / "experiences.parquet")
    both: dict[str, Any] = {"loss": "tis_reinforce", "prefix_sharing": "off", "allow_biased_logprobs": True}

    def training(out: str, **more: Any) -> Any:
        return started("rl", file, model, folder / out, SHAPE, **both, **more)

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        timing = interleave(training("with", score_centering=True).train, training("without").train, RUNS)
    ratio = statistics.median(a / b for a, b in zip(timing.ours_cpu, timing.rival_cpu, strict=True))
    shown = seconds(timing.ours_cpu), f"without, {seconds(timing.rival_cpu)}"
    return Row(f"train-rl --score-centering, K = {K}, {name}, {SHAPE.name}, CPU time", *shown, ratio, at_most=1.25)


def memory(folder: Path, model: Path, name: str) -> Row:
    """The command with and without, on the same file."""
    both = {"loss": "tis_reinforce", "prefix_sharing": "off", "allow_biased_logprobs": True, "max_steps": 2}
    both |= {"per_device_train_batch_size": SHAPE.batch, "save_strategy": "no"}

    def peak(out: str, **more: object) -> float:
        return peak_mb("rl", folder / "experiences.parquet", model, folder / f"memory-{out}", {**both, **more})

    ours, rival = peak("with", score_centering=True), peak("without")
    what = f"train-rl --score-centering, K = {K}, {name}, {SHAPE.name}, peak memory"
    return Row(what, f"{ours:,.0f} MB", f"without, {rival:,.0f} MB", ours / rival)


def main() -> list[Row]:
    if (own := os.environ.get("GYMDATA_BENCH_MODEL")) is None:
        sys.stderr.write("heads: no GYMDATA_BENCH_MODEL: nothing was measured\n")
        return []
    model = Path(own)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [cost(folder, model, model.name), memory(folder, model, model.name)]
        return rows + list(ratios(folder, model))
