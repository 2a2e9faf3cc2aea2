"""``gymdata doctor -m MODEL``: what a model takes, against what the model itself takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.doctor.run import doctor
from gymdata.errors import DataError
from tests.rollout_files import rollout, write_run

pytestmark = pytest.mark.torch

#: What the module promises of memory.
FACTOR = 2


@pytest.fixture(scope="module")
def model(policy: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).train()


def test_the_size_is_that_of_the_loaded_model(policy: Path, model):
    """Parameters, those of an adapter of all linear layers, weights, and the cache of a token, all exactly."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from gymdata.doctor._torch import LORA_RANK, size_of

    size, ids = size_of(str(policy)), model.dummy_inputs["input_ids"]
    assert size.parameters == model.num_parameters() == 622_528
    assert size.weight_bytes == model.get_memory_footprint(return_buffers=False)
    layers = model(input_ids=ids, use_cache=True).past_key_values.layers
    assert size.kv_bytes_per_token * ids.numel() == sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    config = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config)
    assert size.adapter == adapted.get_nb_trainable_parameters()[0]


def test_what_training_keeps_is_within_the_factor(policy: Path, model):
    """Weights, gradients and AdamW's means of a step exactly; what the forward pass keeps for it within a factor of 2."""
    import torch

    from gymdata.doctor._torch import size_of

    size, ids = size_of(str(policy)), torch.arange(256).reshape(4, 64)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    n_bytes = sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in weights)
    assert 1 / FACTOR < n_bytes / ids.numel() / size.activations < FACTOR
    optimizer = torch.optim.AdamW(model.parameters())
    states.sum().backward()
    optimizer.step()
    means = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert sum(tensor.nbytes for tensor in [*model.parameters(), *gradients, *means]) == 16 * size.parameters


def test_a_run_is_trained_next_and_an_empty_folder_collected(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Of a run the tokens are those of its rollouts. Every trainer has its memory, less with LoRA, and its speed."""
    # One step of each measurement, after that of its warm-up, is enough for a number.
    monkeypatch.setattr("gymdata.doctor._torch._SECONDS", 1e-9)
    run = write_run(tmp_path / "run", [rollout("a", index, 1.0, [([1, 2, 3], [4, 5])]) for index in (0, 1)])
    estimate = doctor(run, policy).to_dict()["estimate"]
    assert estimate["next"]["command"].startswith(f"gymdata train-sft {run} -m {policy} ")
    assert estimate["next"]["tokens"] == 10
    assert " ".join(estimate["training"]) == "train-sft train-dpo train-kto train-reward train-value train-rl"
    for trainer in estimate["training"].values():
        assert trainer["memory_lora"] < trainer["memory"]
        assert trainer["tokens_per_s"] > 0
    assert main(["doctor", str(tmp_path), "-m", str(policy), "--json"]) in (0, 1)
    printed = json.loads(capsys.readouterr().out)
    assert printed["estimate"]["next"]["command"].startswith(f"gymdata collect TASKS -m {policy} ")
    assert [c["name"] for c in printed["checks"]][-1] == "next"


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    """It is named."""
    with pytest.raises(DataError, match="no-model"):
        doctor(tmp_path, tmp_path / "no-model")


@pytest.mark.parametrize("config", ["{}", '{"model_type": "mamba"}', '{"model_type": "vit"}', "{"])
def test_a_model_of_another_kind_is_refused(config: str, tmp_path: Path):
    """One without attention, and one without a language."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(DataError, match=str(tmp_path)):
        doctor(tmp_path, tmp_path)
