"""A trained model is saved in the number format in which it was loaded, or that was named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.train.trainers import run
from gymdata.models.model_identity import stored_dtype

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("named", "saved"), [(None, "bfloat16"), ("auto", "bfloat16"), ("float32", "float32")])
def test_a_bfloat16_checkpoint_stays_one(
    policy: Path, assemble: Callable[..., tuple[Any, Any]], tmp_path: Path, named: str | None, saved: str
) -> None:
    """Though its weights are trained in float32, which is kept where it is named."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    small, out = shutil.copytree(policy, tmp_path / "small"), tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(small)
    trainer, _ = assemble(model=small)
    assert next(trainer.model.parameters()).dtype == torch.float32
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.mul_(1 + 2**-12)
    run.save_model(trainer, {"model": str(small), "settings": {"dtype": named}}, out)
    assert {str(w.dtype) for w in load_file(out / "model.safetensors").values()} == {f"torch.{saved}"}
    assert stored_dtype(str(out)) == saved
    assert (out / "tokenizer.json").read_bytes() == (small / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("native", [False, True])
def test_bf16_auto_is_bfloat16_where_the_processor_multiplies_in_it(
    assemble: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """The weights are float32 in both cases."""
    monkeypatch.setattr(run, "multiplies", lambda dtype: native and dtype == "bfloat16")
    trainer, _ = assemble(settings={"bf16": "auto"})
    assert trainer.args.bf16 is native
    assert trainer.accelerator.mixed_precision == ("bf16" if native else "no")
    assert {str(weight.dtype) for weight in trainer.model.parameters()} == {"torch.float32"}
