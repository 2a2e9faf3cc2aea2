"""What a model takes on this machine: memory, speed, and the time of a next command.

Memory is right within a factor of two. Speed is that of the machine as busy as it is, and right within a factor of three.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from gymdata.doctor._torch import LORA_RANK, ModelSize, ModelSpeed, size_of, speed_of
from gymdata.errors import DataError, first_line
from gymdata.public import Figures
from gymdata.store import read_run_json, scan_lazy
from gymdata.store.paths import RUN_JSON

#: Sequences per row of data, and forward passes per token and epoch: three for a gradient, one for a reference, the ratio
#: before the first step, or the other completions of KTO.
TRAINERS = {
    "train-sft": (1, 3),
    "train-dpo": (2, 4),
    "train-kto": (2, 5),
    "train-reward": (2, 3),
    "train-value": (1, 3),
    "train-rl": (1, 4),
}
#: Rows of a step of training, and tokens of a sequence.
ROWS, TOKENS = 8, 512
#: Bytes of a training process and of vLLM's processes without a model.
TRAINING_BASE, ENGINE_BASE = 700_000_000, 2_000_000_000
#: Of the command that is suggested: tasks, rollouts of each, tokens of each; seconds until engine or trainer are loaded.
_TASKS, _ROLLOUTS, _GENERATED, _START = 100, 8, 256, 25


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """``kv_bytes``: of the engine's cache; ``total``: bytes of memory where the model would run; ``next``: a command, the
    tokens that it samples or trains, and its seconds."""

    model: str
    size: ModelSize
    speed: ModelSpeed
    kv_bytes: int
    total: int
    next: tuple[str, int, float]

    @property
    def sampling(self) -> int:
        """Bytes of memory while sampling."""
        return ENGINE_BASE + self.size.weight_bytes + self.kv_bytes

    def training(self, trainer: str, *, lora: bool) -> int:
        """Bytes of memory in a step of ``ROWS`` rows. Weights are float32; those that are trained have a gradient and
        AdamW's two means."""
        size, trained = self.size, self.size.adapter if lora else self.size.parameters
        activations = size.checkpointed if self.speed.device == "cuda" else size.activations
        weights = 4 * (size.parameters + (size.adapter if lora else 0)) + 12 * trained
        return TRAINING_BASE + weights + ROWS * TRAINERS[trainer][0] * TOKENS * activations

    def trained_per_s(self, trainer: str) -> float:
        """Tokens per second, with the forward passes of a reference or ratio where the trainer has them."""
        return self.speed.trained * 3 / TRAINERS[trainer][1]

    def to_dict(self) -> Figures:
        training = {
            name: {
                "memory": self.training(name, lora=False),
                "memory_lora": self.training(name, lora=True),
                "tokens_per_s": self.trained_per_s(name),
            }
            for name in TRAINERS
        }
        sampling = {"memory": self.sampling, "kv_bytes": self.kv_bytes, "tokens_per_s": self.speed.sampled}
        following = dict(zip(("command", "tokens", "seconds"), self.next, strict=True))
        size = {**asdict(self.size), "device": self.speed.device, "memory": self.total}
        return {"model": self.model, "size": size, "sampling": sampling, "training": training, "next": following}

    def lines(self) -> list[tuple[str, str, bool]]:
        """Name, text, and whether it fits in the memory, of each estimate."""
        size, (command, tokens, seconds) = self.size, self.next
        shown = f"{size.parameters:,} parameters in {size.dtype} ({_gb(size.weight_bytes)})"
        cache = f"{_gb(self.kv_bytes)} of KV cache for {self.kv_bytes // size.kv_bytes_per_token:,} tokens in flight"
        sampling = f"{_gb(self.sampling)}, with {cache} ({size.kv_bytes_per_token:,} bytes each)"
        lines = [
            ("model", f"{shown}, {size.layers} layers of {size.width}, on {self.speed.device}", True),
            ("collect", f"{sampling}; {_rate(self.speed.sampled)}", self.sampling <= self.total),
        ]
        for name in TRAINERS:
            full, lora = self.training(name, lora=False), self.training(name, lora=True)
            text = f"{_gb(full)}, LoRA of rank {LORA_RANK} {_gb(lora)}; {_rate(self.trained_per_s(name))}"
            lines.append((name, text, full <= self.total))
        minutes = seconds / 60
        minutes_or_hours = f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:,.0f} h"
        duration = f"{seconds:.0f} s" if minutes < 2 else minutes_or_hours
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        if load > cpus + 1:
            lines.append(("speed", f"timed while {load:.0f} processes shared {cpus} processors", True))
        return [*lines, ("next", f"{tokens:,} tokens in about {duration}: {command}", True)]


def estimate(model: str, folder: Path | None, memory: int, gpu_bytes: int | None) -> ModelEstimate:
    """The estimate of ``model`` on this machine, of ``memory`` bytes and ``gpu_bytes`` of a card (None: no card); the next
    command trains on ``folder`` where that is a run, else it collects. Loads torch and measures for some seconds.

    Raises DataError when there is no such model, UsageError without torch.
    """
    try:
        size = size_of(model)
        speed = speed_of(model, size)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # The code of its architecture raises what it likes.
        why = f"no causal language model of attention layers: {first_line(error)}"
        raise DataError.unreadable(model, why) from error
    card = gpu_bytes if speed.device == "cuda" else None
    total = memory if card is None else card
    # vLLM takes 0.9 of a card; on a CPU gymdata sets 1 GiB, unless the user does.
    cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30)
    kv_bytes = cache if card is None else max(0, int(0.9 * card) - size.weight_bytes - ENGINE_BASE)
    if folder and (folder / RUN_JSON).is_file() and (read_run_json(folder).get("stage") or "collect") == "collect":
        lengths = scan_lazy(folder).select("n_context_tokens", "n_generated_tokens").sum().collect().row(0)
        n_tokens, rate = sum(lengths), speed.trained
        command = f"gymdata train-sft {folder} -m {model} -o {folder}-sft --set select=all"
    else:
        n_tokens, rate = _TASKS * _ROLLOUTS * _GENERATED, speed.sampled
        command = f"gymdata collect TASKS -m {model} -o runs/x -n {_TASKS} -r {_ROLLOUTS} --max-tokens {_GENERATED}"
    return ModelEstimate(model, size, speed, kv_bytes, total, (command, n_tokens, _START + n_tokens / rate))


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 10 else f"{tokens_per_s:.2g} tokens/s"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 10**8 else f"{size / 1e6:,.1f} MB"
