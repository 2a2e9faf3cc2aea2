"""On a CUDA device, in bfloat16 with gradient checkpointing: train-rl, train-dpo and train-sft with and without shared
prefixes and against stock trainers, by time, tokens/s and peak memory; and packed rows against padded ones.

Without such a device nothing is measured. ``GYMDATA_BENCH_MODEL=FOLDER`` races a model of yours too; losses are compared
first.
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

from tests.benchmarks.bench_prefix import KINDS
from tests.benchmarks.bench_train import Shape, sft_sides, started
from tests.benchmarks.rows import Row

RUNS = 3
#: Of both sides. Batches in the file's order, so that sharing changes no batch.
ON_GPU = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True, "dataloader_pin_memory": True}
IN_ORDER = {"train_sampling_strategy": "sequential"}
#: Tokens that eight answers share; which trainers are raced there.
PROMPTS = {50: ("rl",), 500: ("rl", "dpo", "sft"), 2_000: ("rl", "dpo", "sft"), 8_000: ("rl",)}
#: From here on the trees are also run with FlexAttention, whose masks are sparse.
FLEX_FROM = 2_000
#: bfloat16 keeps three digits, and sharing adds in another order.
ALIKE = {"rtol": 2e-2, "atol": 1e-2}


@dataclass
class Arm:
    """One of the trainings that are raced, with what was measured."""

    name: str
    train: Callable[[], object]
    losses: Callable[[], list[float]]
    seconds: list[float] = field(default_factory=list)
    gigabytes: float = 0.0

    def run(self) -> None:
        """Once, timed, with the peak of the memory above what was held before."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            self.train()
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)
        self.gigabytes = (torch.cuda.max_memory_allocated() - before) / 1e9

    def shown(self, tokens: int) -> str:
        median = statistics.median(self.seconds)
        return f"{tokens / median:,.0f} tokens/s, {median:.3g} s, {self.gigabytes:.1f} GB"


def qwen3_600m(folder: Path) -> Path:
    """Qwen3-0.6B's shape with random weights, and the sample policy's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from gymdata.demo.run import sample_data

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
    what: str, ours: dict[str, Callable[[], Any]], rivals: dict[str, Callable[[], Any]], tokens: int
) -> Iterator[Row]:
    """Each of ours against each rival: all of them in turn, after their losses were found alike."""
    arms = {name: arm(name, make) for name, make in (ours | rivals).items()}
    running = [one for one in arms.values() if isinstance(one, Arm)]
    first = [one.losses()[:1] for one in running]
    if not all(np.allclose(one, first[0], **ALIKE) for one in first):
        raise RuntimeError(
            f"{what}: they do not train the same: {dict(zip([a.name for a in running], first, strict=True))}"
        )
    for _ in range(RUNS):
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


def prompts(folder: Path, model: Path, kind: str, prompt: int) -> Iterator[Row]:
    """Four steps of eight answers of 200 tokens to one prompt."""
    rival, sides, _ = KINDS[kind]
    name = f"8 x 200 tokens after {prompt:,}"
    shape = Shape(name, prompts=4, siblings=8, prompt=(prompt, prompt + 1), answer=(200, 201), batch=8)
    folder.mkdir(parents=True)
    file, stock, tokens = sides(folder, model, shape)

    def ours(mode: str, **more: Any) -> Callable[[], Any]:
        own = {"select": "all"} if kind == "sft" else {}
        out = folder / "-".join([mode, *more.values()])
        return lambda: started(kind, file, model, out, shape, prefix_sharing=mode, **own, **IN_ORDER, **ON_GPU, **more)

    arms = {"shared prefixes": ours("on")}
    if prompt >= FLEX_FROM:
        arms["shared prefixes with FlexAttention"] = ours("on", attn_implementation="flex_attention")
    rivals = {"--prefix-sharing off": ours("off"), rival: lambda: stock(**IN_ORDER, **ON_GPU)}
    yield from raced(f"train-{kind}, {name}", arms, rivals, tokens)


def packed(folder: Path, model: Path) -> Iterator[Row]:
    """An epoch over answers of unlike lengths, in padded batches and in packed rows of about as many tokens."""
    shape = Shape(
        "64 answers of 50 to 1,500 tokens", prompts=64, siblings=1, prompt=(50, 51), answer=(50, 1_500), batch=8
    )
    folder.mkdir(parents=True)
    file, stock, tokens = sft_sides(folder, model, shape)

    def ours(out: str, shape: Shape, **more: Any) -> Callable[[], Any]:
        return lambda: started(
            "sft", file, model, folder / out, shape, select="all", prefix_sharing="off", **ON_GPU, **more
        )

    rows = replace(shape, batch=1)
    rival = arm("", lambda: stock(**IN_ORDER, **ON_GPU))
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
        for _ in range(RUNS):
            mine.run(), rival.run()
        ratio = statistics.median(b / a for a, b in zip(mine.seconds, rival.seconds, strict=True))
        what = f"train-sft, {shape.name}, {name} against TRL's SFTTrainer"
        yield Row(what, mine.shown(tokens), rival.shown(tokens), ratio)


def main() -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("gpu: no CUDA device, nothing was measured\n")
        return []
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    own = os.environ.get("GYMDATA_BENCH_MODEL")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"Qwen3-0.6B's shape": qwen3_600m(folder / "qwen3")} | ({Path(own).name: Path(own)} if own else {})
        for which, model in models.items():
            races = [
                prompts(folder / which / f"{kind}-{n}", model, kind, n)
                for n, kinds in PROMPTS.items()
                for kind in kinds
            ]
            for race in [*races, packed(folder / which / "packed", model)]:
                for row in race:
                    rows.append(replace(row, what=f"{card}, {which}: {row.what}"))
                    sys.stderr.write(f"{rows[-1]}\n")
                gc.collect()
                torch.cuda.empty_cache()
    return rows
