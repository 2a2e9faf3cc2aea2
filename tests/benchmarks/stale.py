"""What batch RL learns from rollouts of an older or a coarser sampler, by loss, with and without score centering:

    python -m tests.benchmarks.stale WORK [--seeds 6]
    python -m tests.benchmarks.stale WORK --real --seeds 3

The sample policy answers 300 training tasks eight times, with heads of 20 ids. That policy, trained for 1, 4, 16 or 64 steps
on half of them, is then trained for 16 steps on the other half's old rollouts, with each of the losses; in the second arm
the untrained policy is, on rollouts of its own weights rounded to few bits. What counts is the mean reward of 200 held-out
tasks, greedy. Losses are paired by seed, which orders both trainings, and by task; each has the learning rate that was best
for it on a seed of its own, 0. ``--real``: the same with SmolLM2-135M-Instruct and its own tasks, fewer losses and ages.

Each finished training is a line of WORK/cells.jsonl; started again, it goes on. One thread. Prints the tables at the end, of
all cells that are there; ``--seeds 0`` prints them alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.commands.collect.run import collect, load_parts
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.demo.model import cached_model
from gymdata.commands.demo.steps import running, sample_data
from gymdata.engines.port import Generation, SampleRequest
from gymdata.rollouts.schema import EXPERIENCES, HEAD, ROLLOUTS
from gymdata.stats import two_way_ci
from gymdata.store import read_table
from tests.benchmarks.bench_train import PLAIN, started
from tests.rollout_files import write_table

#: Name → settings of ``train-rl``.
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "reinforce": {"loss": "gpg"},
    "reinforce, centered": {"loss": "gpg", "score_centering": True},
    "truncated IS": {"loss": "tis_reinforce"},
    "truncated IS, centered": {"loss": "tis_reinforce", "score_centering": True},
    "ppo_clip": {"loss": "ppo_clip"},
    "cispo": {"loss": "cispo"},
}
#: In a loss's place: the policy as it is before this training.
BEFORE = "before"
#: The first minus the second.
DIFFERENCES = (
    ("reinforce, centered", "reinforce"),
    ("truncated IS, centered", "truncated IS"),
    ("truncated IS", "reinforce"),
    ("truncated IS", "ppo_clip"),
    ("cispo", "truncated IS"),
)
#: Where learning rates are chosen, and the seed that orders nothing else.
TUNED_AT, TUNING_SEED = "age 16", 0
ROLLOUTS_PER_TASK, HEAD_IDS, MAX_TOKENS = 8, 20, 48


@dataclass(frozen=True)
class Arm:
    """A model with its tasks, and what is compared on it. ``scored``: the flags of ``collect``, as a mapping; of the tasks
    each ``every``-th is sampled, and those of each half are every other one of them. ``ages``: updates that the sampler is
    older than the policy, which ``aging`` makes; ``bits``: of its weights."""

    policy: Path
    tasks: str
    scored: Mapping[str, str]
    every: int
    losses: Sequence[str]
    ages: Sequence[int]
    bits: Sequence[int]
    rates: Sequence[float]
    aging: Mapping[str, Any]
    batch: int
    steps: int
    held_out: int

    @property
    def samplers(self) -> list[str]:
        return [f"age {age}" for age in self.ages] + [f"{bits} bits" for bits in self.bits]


def sample_policy() -> Arm:
    # Aged as its ``rl.yaml`` trains it.
    env = f"{sample_data() / 'calculator.py'}:Calculator"
    return Arm(sample_data() / "policy", "", {"env": env, "reward": "numeric"}, every=2, losses=tuple(LOSSES),
               ages=(1, 4, 16, 64), bits=(4,), rates=(3e-5, 1e-4, 3e-4), aging={"loss": "cispo", "learning_rate": 2e-4},
               batch=32, steps=16, held_out=200)  # fmt: skip


def real_model() -> Arm:
    # Aged as the demo's recipe trains it, ``rl-135m.yaml``.
    model = cached_model(lambda line: print(line, file=sys.stderr))
    return Arm(model, "sentences-", {"reward": f"{sample_data() / 'sentences.py'}:all_right"}, every=1,
               losses=("truncated IS", "truncated IS, centered"), ages=(1, 16), bits=(), rates=(3e-6, 1e-5, 3e-5, 1e-4),
               aging={"loss": "cispo", "learning_rate": 3e-5}, batch=16, steps=8, held_out=100)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A training on old rollouts. ``sampler``: ``age N`` or ``N bits``."""

    loss: str
    sampler: str
    seed: int
    rate: float


class Greedy:
    """A model in this process as an engine: greedy, all requests that wait in one batch."""

    prefers_groups = False
    default_concurrency = 1_000

    def __init__(self, model: Any) -> None:
        self.model = model
        self.waiting: list[tuple[SampleRequest, asyncio.Future[Generation]]] = []

    async def start(self) -> Mapping[str, Any]:
        return {"engine": "transformers", "dtype": "float32"}

    async def sample(self, request: SampleRequest) -> list[Generation]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation] = loop.create_future()
        if not self.waiting:
            loop.call_later(0.2, self.answer_all)
        self.waiting.append((request, answer))
        return [await answer]

    def answer_all(self) -> None:
        import torch

        waiting, self.waiting = self.waiting, []
        prompts = [torch.tensor(list(request.prompt_token_ids)).flip(0) for request, _ in waiting]
        ids = torch.nn.utils.rnn.pad_sequence(prompts, True, padding_value=-1).flip(1)
        end = self.model.config.eos_token_id
        with torch.no_grad():
            sampled = self.model.generate(
                ids.clamp(min=0),
                attention_mask=(ids >= 0).long(),
                max_new_tokens=max(request.max_tokens for request, _ in waiting),
                do_sample=False,
            )[:, ids.shape[1] :].tolist()
        for (request, answer), row in zip(waiting, sampled, strict=True):
            stops = end in row
            tokens = row[: row.index(end) + 1] if stops else row
            answer.set_result(
                Generation(request.prompt_token_ids, tokens, [0.0] * len(tokens), "stop" if stops else "length")
            )

    async def close(self) -> None:
        """Nothing was started."""


class Work:
    """The folder with what was collected, aged and measured."""

    def __init__(self, folder: Path, arm: Arm) -> None:
        self.folder, self.arm = folder, arm
        self.run = running(lambda line: print(line, file=sys.stderr, flush=True))
        folder.mkdir(parents=True, exist_ok=True)

    def tasks(self, part: str) -> Path:
        return sample_data() / "tasks" / f"{self.arm.tasks}{part}.jsonl"

    def collected(self, name: str, model: Path, every: int) -> Path:
        """Experiences of rollouts of each ``every``-th training task."""
        out = self.folder / name / "experiences"
        if not (out / "run.json").is_file():
            tasks = self.folder / f"{name}.jsonl"
            lines = self.tasks("train").read_text(encoding="utf-8").splitlines()
            tasks.write_text("\n".join(lines[::every]) + "\n", encoding="utf-8")
            sampling = ["--max-tokens", MAX_TOKENS, "-r", ROLLOUTS_PER_TASK, "--top-logprobs", HEAD_IDS, "--seed", 1]
            scored = [word for flag, value in self.arm.scored.items() for word in (f"--{flag}", value)]
            words = [tasks, "-m", model, "-o", self.folder / name, *scored, *sampling]
            self.run(["collect", *map(str, words)], (0,))
            self.run(["experience", str(self.folder / name), "-o", str(out)], (0,))
        return out / "experiences.parquet"

    def half(self, number: int) -> Path:
        """Of the policy's experiences those of every other task, from the first or the second one."""
        out, every = self.folder / f"half-{number}.parquet", self.arm.every
        if not out.is_file():
            table = read_table(self.collected("policy", self.arm.policy, every), EXPERIENCES)
            tasks = (int(task.rpartition("-")[2]) // every for task in table["task_id"].to_pylist())
            chosen = [task % 2 == number for task in tasks]
            write_table(table.filter(pa.array(chosen)), out, EXPERIENCES)
        return out

    def rounded(self, bits: int) -> Path:
        """The policy with each row of its matrices rounded to as many steps as ``bits`` have."""
        from transformers import AutoModelForCausalLM

        model, out = AutoModelForCausalLM.from_pretrained(self.arm.policy), self.folder / f"model-{bits}-bits"
        for weights in (w.data for w in model.parameters() if w.dim() == 2):
            step = weights.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            weights.copy_((weights / step).round() * step)
        shutil.copytree(self.arm.policy, out, dirs_exist_ok=True)
        model.save_pretrained(out)
        return out

    def aged(self, age: int, seed: int) -> Path:
        """The policy after ``age`` steps on the other half of the tasks."""
        from transformers import TrainerCallback

        folder, ages = self.folder / f"aged-{seed}", self.arm.ages

        class Saving(TrainerCallback):  # type: ignore[misc]  # of a library without types
            def on_step_end(self, _args: Any, state: Any, _control: Any, model: Any, **_: Any) -> None:
                if state.global_step in ages:
                    model.save_pretrained(unfinished / str(state.global_step))

        if not folder.is_dir():
            unfinished = folder.with_suffix(".tmp")
            for number in ages:
                shutil.copytree(self.arm.policy, unfinished / str(number), dirs_exist_ok=True)
            settings = {**self.arm.aging, "seed": seed, "max_steps": max(ages), "lr_scheduler_type": "constant"}
            with self.training(self.half(1), self.arm.policy, **settings) as trainer:
                trainer.add_callback(Saving)
                trainer.train()
            unfinished.rename(folder)
        return folder / str(age)

    @contextlib.contextmanager
    def training(self, data: Path, model: Path, **settings: Any) -> Iterator[Any]:
        """``train-rl``'s trainer in this process."""
        both = {"per_device_train_batch_size": self.arm.batch, "prefix_sharing": "off", "allow_biased_logprobs": True}
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
            yield started("rl", data, model, Path(name), PLAIN, **both, **settings)

    def rewards(self, model: Any) -> list[float]:
        """Of each held-out task, greedy."""
        with tempfile.TemporaryDirectory() as name:
            config = CollectConfig.load(None, {
                **self.arm.scored, "reward": [self.arm.scored["reward"]], "tasks": str(self.tasks("heldout")),
                "model": str(self.arm.policy), "output": f"{name}/run", "limit": self.arm.held_out,
                "max_tokens": MAX_TOKENS, "num_rollouts": 1, "temperature": 0.0, "seed": 0,
            })  # fmt: skip
            parts = load_parts(config)
            parts.sampler = Greedy(model.eval())
            summary = collect(config=config, parts=parts)
            table = read_table(summary.path, ROLLOUTS, ["task_id", "reward"]).sort_by("task_id")
        return [float(reward) for reward in table["reward"].to_pylist()]

    def before(self, sampler: str, seed: int) -> tuple[Path, Path]:
        """The model that is trained and the experiences, for a sampler."""
        if sampler.startswith("age"):
            return self.aged(int(sampler.split()[1]), seed), self.half(0)
        bits = int(sampler.split()[0])
        return self.arm.policy, self.collected(f"{bits}-bits", self.rounded(bits), 4)

    def measured(self, cell: Cell) -> dict[str, Any]:
        """Train the cell; its line."""
        began = time.process_time()
        model, data = self.before(cell.sampler, cell.seed)
        if cell.loss == BEFORE:
            from transformers import AutoModelForCausalLM

            return {**asdict(cell), "rewards": self.rewards(AutoModelForCausalLM.from_pretrained(model))}
        settings = {**LOSSES[cell.loss], "learning_rate": cell.rate, "lr_scheduler_type": "linear"}
        with self.training(data, model, seed=cell.seed, max_steps=self.arm.steps, **settings) as trainer:
            ratio = trainer.before_training["ratio"]
            trainer.train()
            logged = [row for row in trainer.state.log_history if "loss" in row]
            rewards = self.rewards(trainer.model)
        figures = {name: ratio[name] for name in ("mean", "share_outside", "effective_sample_size")}
        last = {f"last {name}": logged[-1][name] for name in ("ratio/mean", "ratio/clipped", "kl/sampler")}
        return {**asdict(cell), **figures, **last, "seconds": time.process_time() - began, "rewards": rewards}


def covered(experiences: Path) -> float:
    """The mean probability that heads hold."""
    heads = read_table(experiences, EXPERIENCES, [HEAD[1]])[HEAD[1]].combine_chunks().flatten()
    lengths = heads.value_lengths().to_numpy(zero_copy_only=False)
    masses = np.add.reduceat(np.exp(heads.flatten().to_numpy()), np.cumsum(lengths[lengths > 0]) - lengths[lengths > 0])
    return float(masses.mean())


class Results:
    """The lines of cells.jsonl."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # killed while it wrote a line
            file.write_text(whole, encoding="utf-8")
        self.by_cell = {self._cell(row): row for row in map(json.loads, whole.splitlines())}

    def _cell(self, row: Mapping[str, Any]) -> Cell:
        return Cell(row["loss"], row["sampler"], row["seed"], row["rate"])

    def add(self, row: Mapping[str, Any]) -> None:
        self.by_cell[self._cell(row)] = dict(row)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def best_rate(self, loss: str, rates: Sequence[float]) -> float:
        """The learning rate with the highest mean on the tuning seed."""
        return max(rates, key=lambda rate: np.mean(self.by_cell[Cell(loss, TUNED_AT, TUNING_SEED, rate)]["rewards"]))

    def of(self, loss: str, sampler: str) -> dict[int, dict[str, Any]]:
        """Seed → line, of the measured ones."""
        rows = (row for cell, row in self.by_cell.items() if (cell.loss, cell.sampler) == (loss, sampler))
        return {row["seed"]: row for row in rows if row["seed"] != TUNING_SEED}


def tables(results: Results, arm: Arm, masses: Mapping[str, float]) -> str:
    """Means of each loss, and paired differences, for each sampler; only seeds that all losses of it have."""
    differences = [pair for pair in DIFFERENCES if set(pair) <= set(arm.losses)]
    lines = [
        "| sampler | ESS | covered | " + " | ".join((BEFORE, *arm.losses)) + " |",
        "| --- | ---: | ---: | ---: |" + " ---: |" * len(arm.losses),
    ]
    apart = ["| sampler | seeds | " + " | ".join(f"{a} − {b}" for a, b in differences) + " |",
             "| --- | ---: |" + " ---: |" * len(differences)]  # fmt: skip
    for sampler in arm.samplers:
        rows = {loss: results.of(loss, sampler) for loss in (BEFORE, *arm.losses)}
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in rows.values())))
        if not seeds:
            continue
        rewards = {loss: np.array([rows[loss][seed]["rewards"] for seed in seeds]) for loss in rows}
        effective = statistics.mean(rows[arm.losses[0]][seed]["effective_sample_size"] for seed in seeds)
        means = " | ".join(f"{100 * rewards[loss].mean():.1f} %" for loss in rows)
        lines.append(f"| {sampler} | {effective:.1%} | {masses.get(sampler, float('nan')):.4f} | {means} |")
        cells = [two_way_ci(rewards[a] - rewards[b]) for a, b in differences]
        shown = " | ".join(f"{100 * m:+.1f} [{100 * low:.1f}, {100 * high:.1f}]" for m, low, high in cells)
        apart.append(f"| {sampler} | {len(seeds)} | {shown} |")
    rates = {loss: sorted({row["rate"] for s in arm.samplers for row in results.of(loss, s).values()})
             for loss in arm.losses}  # fmt: skip
    chosen = ", ".join(f"{loss} {' or '.join(f'{rate:g}' for rate in found)}" for loss, found in rates.items())
    return "\n".join([*lines, "", *apart, "", f"Learning rates: {chosen}."])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.stale")
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--real", action="store_true", help="with SmolLM2-135M-Instruct")
    arguments = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(1)
    arm = real_model() if arguments.real else sample_policy()
    work, results = Work(arguments.work, arm), Results(arguments.work / "cells.jsonl")

    def measure(cell: Cell) -> None:
        if cell not in results.by_cell:
            results.add(row := work.measured(cell))
            print(f"{cell}: {np.mean(row['rewards']):.3f}", file=sys.stderr, flush=True)

    if arguments.seeds:
        for loss in arm.losses:
            for rate in arm.rates:
                measure(Cell(loss, TUNED_AT, TUNING_SEED, rate))
    for seed in range(1, arguments.seeds + 1):
        for sampler in arm.samplers:
            measure(Cell(BEFORE, sampler, seed, 0.0))
            for loss in arm.losses:
                measure(Cell(loss, sampler, seed, results.best_rate(loss, arm.rates)))
    masses = {
        sampler: covered(work.before(sampler, TUNING_SEED)[1])
        for sampler in arm.samplers
        if results.of(arm.losses[0], sampler)
    }
    print(tables(results, arm, masses))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
