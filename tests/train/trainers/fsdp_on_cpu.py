"""accelerate's FSDP2 in processes without a GPU, where it would fall back to whole models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def accelerate_shards(wanted: bool) -> Iterator[None]:
    """Within this trainers find accelerate as it is with FSDP2 on a GPU; what it then does is its own."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import Trainer

    own = Trainer.create_accelerator_and_postprocess

    def create(trainer: Any) -> None:
        own(trainer)
        state = trainer.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT",
        )
        state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True

    if wanted:
        Trainer.create_accelerator_and_postprocess = create
    try:
        yield
    finally:
        Trainer.create_accelerator_and_postprocess = own
