"""On a model of yours (``GYMDATA_BENCH_MODEL=FOLDER``), on this machine's device: train-rl, train-dpo and train-sft with and
without shared prefixes and against stock trainers, by time, tokens/s and peak memory, after their losses were found alike.

On CUDA in bfloat16 with gradient checkpointing, also on random weights of Qwen3-0.6B's shape, with FlexAttention, and packed
rows against padded ones; on a processor in float32, and ``collect`` against ``LLM.generate``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import bench_collect
from tests.benchmarks.bench_prefix import KINDS
from tests.benchmarks.bench_train import Shape, sft_sides, started
from tests.benchmarks.rows import Row

#: Batches in the file's order, so that sharing changes no batch.
IN_ORDER = {"train_sampling_strategy": "sequential"}
#: bfloat16 keeps three digits, and sharing adds in another order.
ALIKE = {"rtol": 2e-2, "atol": 1e-2}


@dataclass(frozen=True)
class Scale:
    """What a device can do in minutes. ``prompts``: tokens that the answers share → the trainers that are raced there;
    ``flex_from``: from here on the trees are also run with FlexAttention, whose masks are sparse; ``recompute_from``: from
    here on activations are recomputed (gradient checkpointing), on both sides; ``trainer``: settings of both sides."""

    steps: int
    siblings: int
    answer: int
    runs: int
    prompts: dict[int, tuple[str, ...]]
    flex_from: float
    recompute_from: int
    trainer: dict[str, Any]


ON_GPU = Scale(
    steps=4, siblings=8, answer=200, runs=3, flex_from=2_000, recompute_from=0,
    prompts={50: ("rl",), 500: ("rl", "dpo", "sft"), 2_000: ("rl", "dpo", "sft"), 8_000: ("rl",)},
    trainer={"use_cpu": False, "bf16": True, "dataloader_pin_memory": True},
)  # fmt: skip
ON_CPU = Scale(
    steps=1, siblings=4, answer=50, runs=1, flex_from=float("inf"), recompute_from=2_000, trainer={},
    prompts={50: ("rl", "dpo", "sft"), 500: ("rl", "dpo", "sft"), 2_000: ("rl",)},
)  # fmt: skip
#: Rollouts of 32 tokens of the race of ``collect``.
COLLECTED = 400


@dataclass
class Arm:
    """One of the trainings that are raced, with what was measured."""

    name: str
    train: Callable[[], object]
    losses: Callable[[], list[float]]
    seconds: list[float] = field(default_factory=list)
    gigabytes: float = 0.0

    def run(self) -> None:
        """Once, timed: on CUDA by the clock, with the peak of the memory above what was held before; else by CPU time."""
        import torch

        cuda = torch.cuda.is_available()
        clock = time.perf_counter if cuda else time.process_time
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), clock()
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            self.train()
        if cuda:
            torch.cuda.synchronize()
            self.gigabytes = (torch.cuda.max_memory_allocated() - before) / 1e9
        self.seconds.append(clock() - began)

    def shown(self, tokens: int) -> str:
        median = statistics.median(self.seconds)
        memory = f", {self.gigabytes:.1f} GB" if self.gigabytes else ""
        return f"{tokens / median:,.0f} tokens/s, {median:.3g} s{memory}"


def qwen3_600m(folder: Path) -> Path:
    """Qwen3-0.6B's shape with random weights, and the sample policy's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from gymdata.commands.demo.run import sample_data

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1_024, intermediate_size=3_072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sample_data() / "policy").save_pretrained(folder)
    return folder


def arm(name: str, make: Callable[[], Any]) -> Arm | str:
    """A training made and run once, or why it cannot run."""
    import torch

    try:
        trainer = make()
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            trainer.train()
    except torch.OutOfMemoryError:
        return "out of memory"
    return Arm(name, trainer.train, lambda: [row["loss"] for row in trainer.state.log_history if "loss" in row])


def raced(
    what: str, ours: dict[str, Callable[[], Any]], rivals: dict[str, Callable[[], Any]], tokens: int, runs: int
) -> Iterator[Row]:
    """Each of ours against each rival: all of them in turn, after their losses were found alike."""
    arms = {name: arm(name, make) for name, make in (ours | rivals).items()}
    running = [one for one in arms.values() if isinstance(one, Arm)]
    first = [one.losses()[:1] for one in running]
    if not all(np.allclose(one, first[0], **ALIKE) for one in first):
        raise RuntimeError(
            f"{what}: they do not train the same: {dict(zip([a.name for a in running], first, strict=True))}"
        )
    for _ in range(runs):
        for one in running:
            one.run()
    for name in ours:
        for rival in rivals:
            mine, theirs = arms[name], arms[rival]
            shown = [one if isinstance(one, str) else one.shown(tokens) for one in (mine, theirs)]
            ratio = float("nan")
            if isinstance(mine, Arm) and isinstance(theirs, Arm):
                ratio = statistics.median(b / a for a, b in zip(mine.seconds, theirs.seconds, strict=True))
            yield Row(f"{what}, {name} against {rival}", *shown, ratio)


def prompts(folder: Path, model: Path, kind: str, prompt: int, scale: Scale) -> Iterator[Row]:
    """Steps of answers to one prompt each."""
    rival, sides, _ = KINDS[kind]
    name = f"{scale.siblings} x {scale.answer} tokens after {prompt:,}"
    answers = {"siblings": scale.siblings, "batch": scale.siblings, "answer": (scale.answer, scale.answer + 1)}
    shape = Shape(name, prompts=scale.steps, prompt=(prompt, prompt + 1), **answers)
    folder.mkdir(parents=True)
    file, stock, tokens = sides(folder, model, shape)
    both = IN_ORDER | scale.trainer | {"gradient_checkpointing": prompt >= scale.recompute_from}

    def ours(mode: str, **more: Any) -> Callable[[], Any]:
        own = {"select": "all"} if kind == "sft" else {}
        out = folder / "-".join([mode, *more.values()])
        return lambda: started(kind, file, model, out, shape, prefix_sharing=mode, **own, **both, **more)

    arms = {"shared prefixes": ours("on")}
    if prompt >= scale.flex_from:
        arms["shared prefixes with FlexAttention"] = ours("on", attn_implementation="flex_attention")
    rivals = {"--prefix-sharing off": ours("off"), rival: lambda: stock(**both)}
    yield from raced(f"train-{kind}, {name}", arms, rivals, tokens, scale.runs)


def packed(folder: Path, model: Path, scale: Scale) -> Iterator[Row]:
    """An epoch over answers of unlike lengths, in padded batches and in packed rows of about as many tokens."""
    shape = Shape(
        "64 answers of 50 to 1,500 tokens", prompts=64, siblings=1, prompt=(50, 51), answer=(50, 1_500), batch=8
    )
    folder.mkdir(parents=True)
    file, stock, tokens = sft_sides(folder, model, shape)
    both = scale.trainer | {"gradient_checkpointing": True}

    def ours(out: str, shape: Shape, **more: Any) -> Callable[[], Any]:
        return lambda: started(
            "sft", file, model, folder / out, shape, select="all", prefix_sharing="off", **both, **more
        )

    rows = replace(shape, batch=1)
    rival = arm("", lambda: stock(**IN_ORDER, **both))
    for name, make in {
        "padded": ours("padded", shape, **IN_ORDER),
        "packed rows of 8,192": ours("packed", rows, packing=True, pack_length=8_192),
        "packed rows of 8,192 with FlexAttention": ours(
            "flex", rows, packing=True, pack_length=8_192, attn_implementation="flex_attention"
        ),
    }.items():
        mine = arm("", make)
        if isinstance(mine, str) or isinstance(rival, str):
            yield Row(f"train-sft, {shape.name}, {name}", str(mine), str(rival), float("nan"))
            continue
        rival.seconds.clear()
        for _ in range(scale.runs):
            mine.run(), rival.run()
        ratio = statistics.median(b / a for a, b in zip(mine.seconds, rival.seconds, strict=True))
        what = f"train-sft, {shape.name}, {name} against TRL's SFTTrainer"
        yield Row(what, mine.shown(tokens), rival.shown(tokens), ratio)


def main() -> list[Row]:
    import torch

    own = os.environ.get("GYMDATA_BENCH_MODEL")
    models = {Path(own).name: Path(own)} if own else {}
    cuda = torch.cuda.is_available()
    scale = ON_GPU if cuda else ON_CPU
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, " if cuda else ""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if cuda:
            models |= {"Qwen3-0.6B's shape": qwen3_600m(folder / "qwen3")}
        for which, model in models.items():
            cells = ((kind, tokens) for tokens, kinds in scale.prompts.items() for kind in kinds)
            races = [prompts(folder / which / f"{kind}-{n}", model, kind, n, scale) for kind, n in cells]
            if cuda:
                races.append(packed(folder / which / "packed", model, scale))
            else:
                rows.append(bench_collect.compare(f"collect, {which}", model, COLLECTED, "ours", 0.95))
                sys.stderr.write(f"{rows[-1]}\n")
            for race in races:
                for row in race:
                    rows.append(replace(row, what=f"{where}{which}: {row.what}"))
                    sys.stderr.write(f"{rows[-1]}\n")
                gc.collect()
                torch.cuda.empty_cache()
    if not rows:
        sys.stderr.write("real: no GYMDATA_BENCH_MODEL and no CUDA device: nothing was measured\n")
    return rows
