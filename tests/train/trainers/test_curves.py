"""Whole short trainings in this process: resuming, saved references and LoRA."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.train.pair_data import training_pairs
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
from tests.train.trainers.running import curve

pytestmark = pytest.mark.torch

Assemble = Callable[..., tuple[Any, Any]]


def test_saved_and_computed_references_give_one_curve(assemble: Assemble, make_pairs: Any, tmp_path: Path) -> None:
    """Pairs that carry the model's own log-probabilities train alike with ``ref`` saved and model."""
    trainer, _ = assemble(make_pairs())
    rows = read_table(tmp_path / "made" / "pairs.parquet", PAIRS).to_pylist()
    columns: dict[str, list[Any]] = {"chosen_logprobs": [], "rejected_logprobs": []}
    for row, sums in zip(rows, trainer.reference, strict=True):
        for side, value in zip(("chosen", "rejected"), sums, strict=True):
            mask = np.array(row[f"{side}_mask"])
            columns[f"{side}_logprobs"].append((mask * value / mask.sum()).tolist())
    file = make_pairs(**columns)
    logprobs = training_pairs(read_table(file, PAIRS)).lists("logprobs")
    assert np.allclose(logprobs.sums(logprobs.values, np.float64).reshape(-1, 2), trainer.reference)
    for ref in ("model", "saved"):
        (tmp_path / ref).mkdir()
        trainer, _ = assemble(file, ref=ref, output=str(tmp_path / ref), settings={"learning_rate": 1e-3})
        trainer.train()
    computed, saved = curve(tmp_path / "model"), curve(tmp_path / "saved")
    assert list(saved.values()) == pytest.approx(list(computed.values()), abs=1e-5)
    assert len(set(saved.values())) > 1


def test_lora_trains_an_adapter_of_the_same_tokens(assemble: Assemble, policy: Path, tmp_path: Path) -> None:
    """LoRA starts at ln 2, moves, proves its tokens, and its folder can be trained further with itself as reference, also
    where it names its base by a relative path and no tokenizer lies beside it."""
    from gymdata.commands.train.trainers.run import save_model

    out = tmp_path / "out"
    settings = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "learning_rate": 1e-2, "lora_r": 4}
    trainer, token_checksum = assemble(settings=settings)
    trainer.train()
    assert token_checksum.as_json()["equal"]
    losses = list(curve(out).values())
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses[-1] < losses[0]
    save_model(trainer, {"model": str(policy)}, out)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(policy)
    # peft's form for a model card has nothing filled in.
    assert not (out / "README.md").exists()
    config["base_model_name_or_path"] = os.path.relpath(policy, out)
    (out / "adapter_config.json").write_text(json.dumps(config))
    for file in out.glob("tokenizer*"):
        file.unlink()
    again, token_checksum = assemble(model=str(out), output=str(tmp_path / "again"))
    again.train()
    assert token_checksum.as_json()["equal"]
    assert next(iter(curve(tmp_path / "again").values())) == pytest.approx(np.log(2), abs=1e-5)
