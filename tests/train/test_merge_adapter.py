"""``gymdata.merge_adapter`` and ``--merge``: a LoRA folder and its base are one model folder, complete, with a run.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import gymdata
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.models.forward import load_policy
from gymdata.models.model_identity import policy_facts
from gymdata.store import read_run_json, write_run_json
from tests.model_files import POLICY, write_adapter
from tests.train.trainers.running import gymdata as train

pytestmark = pytest.mark.torch


def test_the_model_is_base_and_adapter_together(tmp_path: Path) -> None:
    """The adapter's weights are added, all else is the base's; run.json leads back to both, and another adapter is refused
    in its place."""
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "model"
    report = gymdata.merge_adapter(adapter, out)
    policy_hash = policy_facts(str(out))["policy_hash"]
    assert (report.base, report.dtype, report.policy_hash) == (str(POLICY), "float32", policy_hash)
    before, after = load_file(POLICY / "model.safetensors"), load_file(out / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert before.keys() == after.keys()
    assert {n for n in before if not before[n].equal(after[n])} == {name}
    assert (after[name] - before[name] - 0.5).abs().max() < 1e-5
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert not (POLICY / file).exists() or (out / file).read_bytes() == (POLICY / file).read_bytes()
    facts = read_run_json(out)
    assert facts["stage"] == "merged-model"
    assert [Path(parent["path"]) for parent in facts["parents"]] == [adapter, POLICY]
    assert "model.safetensors" in {file["path"] for file in facts["files"]}
    assert not report.existing
    # A server of another user reads the weights, too.
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    with pytest.raises(StoreError, match="policy_hash"):
        gymdata.merge_adapter(write_adapter(tmp_path / "other", 0.25), out)


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(UsageError, match=r"no adapter_config.json, expected a LoRA folder"):
        gymdata.merge_adapter(POLICY, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_that_is_there_is_written_over(tmp_path: Path) -> None:
    """Files that no run.json describes, the adapter itself and its base, which no command could make again."""
    pytest.importorskip("peft")
    base, out = Path(shutil.copytree(POLICY, tmp_path / "base")), tmp_path / "out"
    adapter = write_adapter(tmp_path / "adapter", base=base)
    out.mkdir()
    (out / "model.safetensors").write_text("precious")
    with pytest.raises(StoreError, match=r"is not empty, and no run.json says what it holds .model.safetensors."):
        gymdata.merge_adapter(adapter, out)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("model.safetensors", "precious")]
    for merged in (adapter, base):
        with pytest.raises(UsageError, match="is itself merged here"):
            gymdata.merge_adapter(adapter, merged, overwrite=True)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """By its sizes and, where its run.json has the hash of the weights that it was trained on, by that."""
    pytest.importorskip("peft")
    from safetensors.numpy import load_file, save_file

    adapter = write_adapter(tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    narrow = write_adapter(tmp_path / "narrow")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**weights, name: np.ones((1, 3), np.float32)}, narrow / "adapter_model.safetensors")
    wrong_size = rf"narrow: is not an adapter of {POLICY}: \S*q_proj.lora_A\S* is \[1, 3\], needs \[1, \d+\]"
    with pytest.raises(DataError, match=wrong_size):
        gymdata.merge_adapter(narrow, tmp_path / "out")
    with pytest.raises(DataError, match=wrong_size):
        load_policy(str(narrow), device="cpu")
    trained = {"stage": "train-sft", "config": {"trainer": {"use_peft": True}}}
    write_run_json(adapter, {**trained, "model": {"policy_hash": "0" * 32}})
    with pytest.raises(RefusedError, match=rf"policy_hash 0+, and its base {POLICY} has \w+"):
        gymdata.merge_adapter(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_run_json(adapter, {**trained, "model": {"policy_hash": policy_facts(str(POLICY))["policy_hash"]}})
    assert gymdata.merge_adapter(adapter, tmp_path / "out").base == str(POLICY)


def test_a_base_beside_the_adapter_brings_all_its_chat_templates(tmp_path: Path) -> None:
    """A relative base is read from the adapter's folder, as by every other command."""
    pytest.importorskip("peft")
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(POLICY, base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    adapter = write_adapter(tmp_path / "adapter", base=base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "../base"}))
    report = gymdata.merge_adapter(adapter, out)
    assert Path(report.base).resolve() == base
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "{{ messages }}"
    assert gymdata.merge_adapter(adapter, out).existing


def test_a_model_that_is_there_is_not_merged_again(tmp_path: Path) -> None:
    """The report says so; a file that is gone, and --overwrite, merge again."""
    pytest.importorskip("peft")
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "model"
    first = gymdata.merge_adapter(adapter, out)
    inode = (out / "config.json").stat().st_ino
    again = gymdata.merge_adapter(adapter, out)
    assert (again.existing, again.policy_hash) == (True, first.policy_hash)
    assert ("already there", f"{out} (overwrite=True merges again)") in again.rows()
    assert (out / "config.json").stat().st_ino == inode
    (out / "tokenizer.json").unlink()
    assert not gymdata.merge_adapter(adapter, out).existing
    assert (out / "tokenizer.json").is_file()
    assert not gymdata.merge_adapter(adapter, out, overwrite=True).existing


ROLLOUTS = POLICY.parent / "rollouts" / "clean.jsonl"
LORA = ("--lora", "--set", "lora_r=4", "--set", "lora_target_modules=all-linear")


def test_a_training_writes_the_merged_model_too(tmp_path: Path) -> None:
    """In OUTPUT/merged, printed and in --json; without --merge before, the same command writes it from the adapter that is
    there, and with a LoRA folder as the model it is merged as well."""
    pytest.importorskip("peft")
    out, once = tmp_path / "out", ("--set", "max_steps=1", "--json")
    words = ["train-sft", ROLLOUTS, "-m", POLICY, "-o", out, *LORA, *once]
    first = train(*words)
    assert (first.returncode, (out / "merged").exists()) == (0, False), first.stderr
    assert "merged" not in json.loads(first.stdout)
    merged = train(*words, "--merge")
    assert (merged.returncode, "nothing to do" in merged.stderr) == (0, True), merged.stderr
    assert json.loads(merged.stdout)["merged"] == str(out / "merged")
    assert policy_facts(str(out / "merged"))["adapter"] is None
    facts = read_run_json(out / "merged")
    assert [Path(parent["path"]) for parent in facts["parents"]] == [out, POLICY]
    assert facts["identity"]["policy_hash"] == policy_facts(str(out))["policy_hash"]
    further = train("train-sft", ROLLOUTS, "-m", out, "-o", tmp_path / "further", "--set", "max_steps=1", "--merge")
    assert further.returncode == 0, further.stderr
    assert f"merged with its base {tmp_path / 'further' / 'merged'}" in " ".join(further.stdout.split())
    gone = train(*words, "--overwrite")
    assert (gone.returncode, (out / "merged").exists()) == (0, False), gone.stderr


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "rl"])
def test_merging_needs_an_adapter(trainer: str, tmp_path: Path) -> None:
    """Refused before anything is read."""
    refused = train(f"train-{trainer}", ROLLOUTS, "-m", POLICY, "-o", tmp_path / "out", "--merge")
    assert (refused.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "--merge has no effect without an adapter (use_peft or --lora, or a LoRA folder as the model)" in " ".join(
        refused.stderr.split()
    )


def test_only_trainers_of_policies_merge(tmp_path: Path) -> None:
    """A reward model and a critic have a head that is no part of a causal model."""
    for trainer in ("reward", "value"):
        assert train(f"train-{trainer}", ROLLOUTS, "-m", POLICY, "-o", tmp_path / "out", "--merge").returncode == 2
