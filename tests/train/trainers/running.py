"""A trainer as tests run it: the command, a training cut short, its curve, its gradients, and shards without a GPU."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import pytest
from transformers import TrainerCallback

from gymdata.cli.main import main
from gymdata.commands.train.trainers.metrics import read_metrics


def gymdata(*words: object) -> CompletedProcess[str]:
    """Run the command here, where torch is loaded already."""
    out, err = io.StringIO(), io.StringIO()
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with mock.patch.dict(os.environ, threads), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, words)])
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())


def curve(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row}


class Crash(TrainerCallback):
    """Ends training as a crash would, just after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("crash")


def loss_and_gradients(trainer: Any) -> tuple[float, dict[str, Any]]:
    """Of one step over the whole file, in the trainer's own micro-batches."""
    batches = list(trainer.get_train_dataloader())
    count = trainer._get_num_items_in_batch(batches, trainer.args.device)
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=count)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def assert_same(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]], rel: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel, abs=rel)
    scale = max(float(g.abs().max()) for g in expected[1].values())
    for name, gradient in expected[1].items():
        assert float((found[1][name].double() - gradient.double()).abs().max()) <= rel * scale, name


@contextmanager
def accelerate_shards(wanted: bool) -> Iterator[None]:
    """Within this accelerate says of itself what it says with FSDP2 on GPUs; what it then does is its own."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import Trainer

    begin, create = AcceleratorState.__init__, Trainer.create_accelerator_and_postprocess

    def begun(state: Any, *arguments: Any, **named: Any) -> None:
        begin(state, *arguments, **named)
        state.distributed_type = DistributedType.FSDP

    def created(trainer: Any) -> None:
        create(trainer)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        trainer.accelerator.state.fsdp_plugin = plugin
        trainer.accelerator.state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
        AcceleratorState.__init__ = begun

    if wanted:
        Trainer.create_accelerator_and_postprocess = created
    try:
        yield
    finally:
        AcceleratorState.__init__, Trainer.create_accelerator_and_postprocess = begin, create
