"""The number format that a model is sampled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.store import read_run_json

ROOT = Path(__file__).parents[2]


@pytest.mark.torch
@pytest.mark.engine
def test_a_run_is_sampled_in_one_format_which_the_processor_has(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights in bfloat16 are sampled in float32 where the processor would be slow, said so, and a run that began so goes on
    so where another machine takes it up."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, run = str(tmp_path / "model"), tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16").save_pretrained(model)
    AutoTokenizer.from_pretrained(policy).save_pretrained(model)
    tasks = str(ROOT / "sample_data" / "tasks" / "train.jsonl")
    words = ["collect", tasks, "-m", model, "-o", str(run), "--max-tokens", "16", "--seed", "1", "-r", "2"]

    def collected(limit: int, has_bfloat16: bool) -> Any:
        monkeypatch.setattr("gymdata.models._torch.multiplies", lambda dtype: dtype != "bfloat16" or has_bfloat16)
        assert main([*words, "-n", str(limit)]) == 0
        return read_run_json(run)["engine"]["dtype"], capsys.readouterr().err

    dtype, messages = collected(4, has_bfloat16=False)
    assert dtype == "float32"
    assert "sampling in float32: the weights are in bfloat16, in which this processor is slow" in messages
    assert collected(8, has_bfloat16=True)[0] == "float32"
