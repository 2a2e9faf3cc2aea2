"""accelerate's FSDP2 in processes without a GPU, where it would fall back to whole models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
