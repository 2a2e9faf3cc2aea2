"""``gymdata merge-adapter``: a LoRA folder and its base are one model folder, complete, with a run.json."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymdata
from gymdata.errors import StoreError, UsageError
from gymdata.models.model_identity import policy_facts
from gymdata.store import read_run_json
from tests.model_files import POLICY, write_adapter

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
    assert facts["stage"] == "merge-adapter"
    assert [Path(parent["path"]) for parent in facts["parents"]] == [adapter, POLICY]
    assert "model.safetensors" in {file["path"] for file in facts["files"]}
    assert not report.existing
    with pytest.raises(StoreError, match="policy_hash"):
        gymdata.merge_adapter(write_adapter(tmp_path / "other", 0.25), out)


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(UsageError, match=r"no adapter_config.json, expected a LoRA folder"):
        gymdata.merge_adapter(POLICY, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_there_is_not_merged_again(tmp_path: Path) -> None:
    """The report says so; a file that is gone, and --overwrite, merge again."""
    pytest.importorskip("peft")
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "model"
    first = gymdata.merge_adapter(adapter, out)
    inode = (out / "config.json").stat().st_ino
    again = gymdata.merge_adapter(adapter, out)
    assert (again.existing, again.policy_hash) == (True, first.policy_hash)
    assert ("already there", f"{out} (--overwrite merges again)") in again.rows()
    assert (out / "config.json").stat().st_ino == inode
    (out / "tokenizer.json").unlink()
    assert not gymdata.merge_adapter(adapter, out).existing
    assert (out / "tokenizer.json").is_file()
    assert not gymdata.merge_adapter(adapter, out, overwrite=True).existing
