"""collect with a LoRA folder as the model, on a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.collect.run import collect
from gymdata.commands.validate.run import validate
from gymdata.errors import StoreError
from gymdata.models.model_identity import policy_facts
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json, read_table

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TASKS = str(ROOT / "sample_data" / "tasks" / "train.jsonl")


def make_adapter(folder: Path, policy: str, seed: int) -> Path:
    """A small adapter that changes what the policy says, saved as peft saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), config)
    model.save_pretrained(folder)
    return folder


def log_probs(model: Any, prompt: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """What ``model`` gives the generated ids after the prompt."""
    import torch

    ids = torch.tensor([[*prompt.tolist(), *generated]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    scores = torch.log_softmax(logits, -1)
    return scores[torch.arange(len(generated)), torch.tensor(list(generated))].numpy()


@pytest.mark.engine
@pytest.mark.full
def test_an_adapter_is_sampled_from_and_hashed(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is merged once, in the cache. The log-probs are those of base and adapter together, not of the base; the
    run's policy_hash covers both, so another adapter is another run, and its tokenizer is the base's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pytest.importorskip("vllm")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    adapter = make_adapter(tmp_path / "lora", policy, seed=1)
    settings: dict[str, Any] = {
        "tasks": TASKS, "limit": 6, "num_rollouts": 2, "max_tokens": 24, "seed": 1, "output": tmp_path / "run",
    }  # fmt: skip
    summary = collect(model=str(adapter), **settings)
    assert (summary.rollouts, summary.exit_code) == (12, 0)
    assert validate(tmp_path / "run").errors == 0
    run = read_run_json(tmp_path / "run")
    assert run["engine"]["lora"] is None
    assert Path(run["engine"]["merged"]).parent == tmp_path / "cache" / "gymdata" / "merged"
    assert run["identity"]["policy_hash"] == policy_facts(str(adapter))["policy_hash"]
    assert run["identity"]["policy_hash"] != policy_facts(policy)["policy_hash"]

    base = AutoModelForCausalLM.from_pretrained(policy, dtype="float32").eval()
    alone, together = [], []
    rows = read_table(tmp_path / "run").to_pylist()
    calls = [
        (prompt, np.array(turn["generation_token_ids"]), np.array(turn["generation_log_probs"]))
        for row in rows
        for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True)
    ]
    for prompt, generated, sampled in calls:
        alone.append(np.abs(log_probs(base, prompt, generated) - sampled).max())
    both = peft.PeftModel.from_pretrained(base, adapter).eval()
    for prompt, generated, sampled in calls:
        together.append(np.abs(log_probs(both, prompt, generated) - sampled).max())
    assert max(together) < 1e-3
    assert np.median(alone) > 0.01

    make_adapter(tmp_path / "lora", policy, seed=2)
    with pytest.raises(StoreError, match="policy_hash"):
        collect(model=str(adapter), **settings)
