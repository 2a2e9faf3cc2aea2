"""Model folders are left in the number format of the model that they came from, with all that it needs besides weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gymdata.models.model_identity import stored_dtype
from tests.model_files import POLICY, write_adapter

pytestmark = pytest.mark.torch


def saved(folder: Path, weights: list[float], dtype: str = "float32") -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"w": torch.tensor(weights, dtype=getattr(torch, dtype)), "steps": torch.tensor([3])}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"dtype": dtype, "hidden_size": 2}))
    return folder


def test_weights_are_rounded_to_the_format(tmp_path: Path) -> None:
    """1 + 2⁻¹⁰ becomes 1 in bfloat16, whole numbers and integers stay, and config.json names the format."""
    import torch
    from safetensors.torch import load_file

    from gymdata.models._saving import round_weights

    model = saved(tmp_path, [1 + 2**-10, 2.0])
    round_weights(model, "bfloat16")
    weights = load_file(model / "model.safetensors")
    assert weights["w"].dtype == torch.bfloat16
    assert weights["w"].tolist() == [1.0, 2.0]
    assert weights["steps"].tolist() == [3]
    assert json.loads((model / "config.json").read_text()) == {"dtype": "bfloat16", "hidden_size": 2}
    assert stored_dtype(str(model)) == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", None, "float8_e4m3fn"])
def test_what_is_in_the_format_or_in_none_to_train_in_stays(tmp_path: Path, dtype: str | None) -> None:
    """Nothing is rounded then."""
    from safetensors.torch import load_file

    from gymdata.models._saving import round_weights

    round_weights(saved(tmp_path, [1 + 2**-10]), dtype)
    assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [1 + 2**-10]
    assert stored_dtype(str(tmp_path)) == "float32"


def test_tokenizer_template_and_generation_config_go_along(tmp_path: Path) -> None:
    """Those of an adapter, and of its base what the adapter's folder lacks."""
    from gymdata.models._saving import copy_companions

    base, adapter, out = saved(tmp_path / "base", [1.0]), tmp_path / "adapter", tmp_path / "out"
    for folder in (adapter, out, base / "additional_chat_templates"):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (base / "generation_config.json").write_text("base")
    (base / "chat_template.jinja").write_text("base")
    (base / "additional_chat_templates" / "rag.jinja").write_text("base")
    (adapter / "chat_template.jinja").write_text("adapter")
    copy_companions(str(adapter), out)
    found = {str(file.relative_to(out)): file.read_text() for file in out.rglob("*") if file.is_file()}
    templates = {"chat_template.jinja": "adapter", "additional_chat_templates/rag.jinja": "base"}
    assert found == templates | {"generation_config.json": "base"}


def test_a_merged_adapter_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, and found by the hash of base and adapter; it computes what both do together, in the base's format."""
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    from gymdata.models._saving import merged_in_cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapter = write_adapter(tmp_path / "adapter")
    merged = merged_in_cache(str(adapter))
    assert merged.parent == tmp_path / "cache" / "gymdata" / "merged"
    written = (merged / "model.safetensors").stat().st_mtime_ns
    assert merged_in_cache(str(adapter)) == merged
    assert (merged / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in merged.parent.iterdir()] == [merged.name]
    assert stored_dtype(str(merged)) == stored_dtype(str(POLICY))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        alone = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
        expected = peft.PeftModel.from_pretrained(base, adapter).eval()(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(input_ids=ids).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(alone, expected, atol=1e-4)


def test_what_is_sampled_in_float32_is_merged_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a base in bfloat16 it computes what ``audit`` and the trainer do, which round no sum of base and adapter; what is
    merged for bfloat16 does not, and is another folder."""
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    from gymdata.models._saving import merged_in_cache, round_weights

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(POLICY, base := tmp_path / "base")
    round_weights(base, "bfloat16")
    adapter = write_adapter(tmp_path / "adapter", 0.01, base)
    ids = torch.arange(5, 25)[None]

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits

    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits(peft.PeftModel.from_pretrained(loaded, adapter))
    off = {}
    for sampled_in in ("float32", "bfloat16"):
        merged = merged_in_cache(str(adapter), sampled_in)
        assert stored_dtype(str(merged)) == sampled_in
        assert merged_in_cache(str(adapter), sampled_in) == merged
        found = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
        off[sampled_in] = float((found - expected).abs().max())
    assert off["float32"] < 1e-4 < off["bfloat16"]
