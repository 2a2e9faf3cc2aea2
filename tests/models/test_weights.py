"""Who a policy is does not depend on where its files lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gymdata.errors import DataError
from gymdata.models import model_identity

POLICY = Path(__file__).parents[2] / "sample_data" / "policy"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(POLICY, tmp_path / "copy"))


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_a_copy_is_the_same_policy(copy):
    """The folder's name and what config.json says of versions do not count."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0.0", "_name_or_path": "x"}))
    assert (
        model_identity.policy_facts(str(copy))["policy_hash"] == model_identity.policy_facts(str(POLICY))["policy_hash"]
    )


def test_one_byte_makes_another_policy(copy):
    """Any byte of the weights counts, and so does the architecture."""
    flip_last_byte(copy / "model.safetensors")
    changed = model_identity.policy_facts(str(copy))["policy_hash"]
    assert changed != model_identity.policy_facts(str(POLICY))["policy_hash"]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert model_identity.policy_facts(str(copy))["policy_hash"] != changed


def test_large_weights_are_sampled_and_say_so(copy):
    """Above the limit the hash reads places only, names itself sampled, and still sees the last byte."""
    before = model_identity.policy_hash(copy, full_below=10)
    flip_last_byte(copy / "model.safetensors")
    after = model_identity.policy_hash(copy, full_below=10)
    assert before.startswith("sampled:")
    assert before != after


def adapter(folder: Path, base: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    (folder / "adapter_model.safetensors").write_bytes((POLICY / "model.safetensors").read_bytes()[:5000])
    return folder


def test_an_adapter_is_its_base_and_itself(copy, tmp_path):
    """A LoRA folder's hash changes with the adapter and with the base, and its tokenizer is the base's."""
    lora = adapter(tmp_path / "lora", str(copy))
    facts = model_identity.policy_facts(str(lora))
    assert facts["base"] == str(copy)
    assert model_identity.tokenizer_folder(str(lora)) == str(copy)
    flip_last_byte(copy / "model.safetensors")
    other_base = model_identity.policy_facts(str(lora))["policy_hash"]
    flip_last_byte(lora / "adapter_model.safetensors")
    assert len({facts["policy_hash"], other_base, model_identity.policy_facts(str(lora))["policy_hash"]}) == 3


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("text", ["", "{nope", "[]"])
def test_a_damaged_config_is_named(copy: Path, tmp_path: Path, name: str, text: str) -> None:
    """The file that holds no JSON object, of the base or of the adapter."""
    lora = adapter(tmp_path / "lora", str(copy))
    damaged = (copy if name == "config.json" else lora) / name
    damaged.write_text(text)
    with pytest.raises(DataError, match=f"{damaged}: cannot be read: "):
        model_identity.policy_facts(str(lora))


def test_a_base_may_lie_beside_its_adapter(copy, tmp_path):
    """A relative base is found from the adapter's folder."""
    lora = adapter(tmp_path / "lora", "../copy")
    assert Path(model_identity.policy_facts(str(lora))["base"]).resolve() == copy.resolve()


def test_what_is_missing_is_named(tmp_path):
    """No folder, no weights, and an unknown base are errors with the place."""
    with pytest.raises(DataError, match="holds no weights"):
        model_identity.policy_facts(str(tmp_path))
    with pytest.raises(DataError, match="missing"):
        model_identity.policy_facts(str(tmp_path / "missing"))
    with pytest.raises(DataError, match="base model"):
        model_identity.policy_facts(str(adapter(tmp_path / "lora", "/nowhere/base")))
    with pytest.raises(DataError, match=r"base model .* is a LoRA folder itself"):
        model_identity.policy_facts(str(adapter(tmp_path / "second", str(adapter(tmp_path / "first", str(POLICY))))))


def test_a_served_model_has_its_name():
    """Weights that only a server has are named, not hashed."""
    assert model_identity.served_facts("m")["policy_hash"] == "served:m"


def test_the_tokenizer_hash_is_that_of_the_meaning(tmp_path):
    """Saving a tokenizer again changes bytes, and not the hash."""
    transformers = pytest.importorskip("transformers")
    one = transformers.AutoTokenizer.from_pretrained(POLICY)
    one.save_pretrained(tmp_path)
    two = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model_identity.hash_of_tokenizer(one) == model_identity.hash_of_tokenizer(two)
    two.add_tokens(["zzz"])
    assert model_identity.hash_of_tokenizer(one) != model_identity.hash_of_tokenizer(two)
