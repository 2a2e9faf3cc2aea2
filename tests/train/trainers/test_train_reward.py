"""``train-reward``: scores are read at the answers' ends, held-out tasks measure the model, and its folder can be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.errors import UsageError
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
from tests.rollout_files import training_data
from tests.train.trainers.conftest import pair_rows, start, write_pairs
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch


@pytest.fixture
def ends_are_pads(policy: Path, tmp_path: Path) -> Path:
    """The policy with a tokenizer that pads with its end token."""
    folder = tmp_path / "ends_are_pads"
    shutil.copytree(policy, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "<e>"}))
    return folder


def ranked(policy: Path, folder: Path, n: int = 60) -> Path:
    """Pairs whose chosen side ends with token 50, the rejected with 60."""
    rows = pair_rows(policy, n)
    for side, last in (("chosen", 50), ("rejected", 60)):
        rows[f"{side}_ids"] = [[*ids[:-1], last] for ids in rows[f"{side}_ids"]]
    return write_pairs(folder, rows)


def test_no_task_is_on_both_sides(policy: Path, tmp_path: Path) -> None:
    """The split is by task, drawn by the seed, and independent of the order of rows."""
    table = read_table(write_pairs(tmp_path, pair_rows(policy, 40)), PAIRS)
    data = training_data("reward", table, split=0.25, seed=1)
    assert data.counts == {"pairs": 30, "heldout_pairs": 10, "heldout_tasks": 5}
    task = dict(zip(table["pair_id"].to_pylist(), table["task_id"].to_pylist(), strict=True))
    assert not {task[p] for p in data.table["name"].to_pylist()} & set(data.heldout.tasks)
    turned = training_data("reward", table.take(np.arange(39, -1, -1)), split=0.25, seed=1)
    assert set(turned.heldout.tasks) == set(data.heldout.tasks)
    assert set(training_data("reward", table, split=0.25, seed=2).heldout.tasks) != set(data.heldout.tasks)
    assert len(training_data("reward", table, split=0.0, seed=1).heldout) == 0


def test_the_pad_is_never_an_end(ends_are_pads: Path, tmp_path: Path) -> None:
    """With a tokenizer that pads with its end token another token fills up, and a padded score is the score alone."""
    import torch

    rows = pair_rows(ends_are_pads)
    end = 2
    rows["chosen_ids"] = [[*ids[:-1], end] for ids in rows["chosen_ids"]]
    trainer, _ = start("reward", write_pairs(tmp_path, rows), ends_are_pads, tmp_path / "out", {}, split=0.0)
    assert trainer.processing_class.pad_token_id not in (end, None)
    assert trainer.model.config.pad_token_id == trainer.processing_class.pad_token_id
    trainer.model.eval()
    for batch in trainer.get_train_dataloader():
        with torch.no_grad():
            together = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        for line, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
            with torch.no_grad():
                hidden = trainer.model.model(input_ids=batch["input_ids"][line : line + 1, :length]).last_hidden_state
            alone = trainer.model.score(hidden[0, -1])
            assert together[line].item() == pytest.approx(alone.item(), abs=1e-5)


def test_a_pad_that_ends_a_sequence_is_not_taken() -> None:
    """The tokenizer's pad where it can be, else unknown or another special token, else an error."""
    from gymdata.commands.train.trainers.reward import distinct_pad

    class Tokens:
        """A tokenizer's special ids."""

        def __init__(self, pad: int | None, eos: int, special: list[int]) -> None:
            self.pad_token_id, self.unk_token_id, self.eos_token_id = pad, None, eos
            self.all_special_ids, self.added_tokens_decoder = special, {}

    assert distinct_pad(Tokens(0, 2, [0, 1, 2]), {7}) == 0
    assert distinct_pad(Tokens(2, 2, [0, 1, 2]), {7}) == 1
    assert distinct_pad(Tokens(0, 2, [0, 1, 2]), {0, 7}) == 1
    with pytest.raises(UsageError, match="does not also end"):
        distinct_pad(Tokens(2, 2, [2]), {7})


def test_weights_and_margins_enter_the_loss(policy: Path, tmp_path: Path) -> None:
    """The loss is the mean of weight · −log σ(difference − margin); with weight 1 and margin 0 it is TRL's own."""
    import torch

    weights, margins = [float(i % 3) for i in range(13)], [0.5 * (i + 1) for i in range(13)]
    file = write_pairs(tmp_path, pair_rows(policy, weight=weights, margin=margins))
    trainer, _ = start("reward", file, policy, tmp_path / "out", {}, split=0.0, margin_scale=0.1)
    for batch in trainer.get_train_dataloader():
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        chosen, rejected = trainer.model(**given).logits.squeeze(-1).detach().chunk(2)
        apart = chosen - rejected - 0.1 * torch.tensor([margins[r] for r in batch["rows"]])
        expected = -(torch.tensor([weights[r] for r in batch["rows"]]) * torch.nn.functional.logsigmoid(apart)).mean()
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.matrix("True")
@pytest.mark.parametrize("lora", [False, True])
def test_the_command_makes_a_model_that_ranks(policy: Path, tmp_path: Path, lora: bool) -> None:
    """Held-out pairs are ranked right, the proof holds, and the folder scores as a sequence classifier, adapter merged."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = tmp_path / "out"
    flags = ["--lora", "--set", "lora_target_modules=[q_proj, v_proj, down_proj]", "--set", "lora_r=8"] if lora else []
    done = gymdata("train-reward", ranked(policy, tmp_path), "-m", policy, "-o", out, "--json", "--split", 0.2, *flags,
                   "--set", "num_train_epochs=6", "--set", "learning_rate=5e-3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["trained_tokens"]["equal"] is True
    heldout = result["heldout"]
    assert (heldout["pairs"], heldout["tasks"]) == (12, 6)
    assert heldout["accuracy"] > 0.8
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert not (out / "adapter_config.json").exists()
    assert result["parents"][0]["path"].endswith("pairs.parquet")

    def score(ids: list[int]) -> float:
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits)

    rows = pair_rows(policy, 20, seed=9)
    right = [
        score([*p, *a[:-1], 50]) > score([*p, *a[:-1], 60])
        for p, a in zip(rows["prompt_ids"], rows["chosen_ids"], strict=True)
    ]
    assert np.mean(right) > 0.8
    logged: list[dict[str, Any]] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["heldout/accuracy"] for row in logged if "heldout/accuracy" in row][-1] == heldout["accuracy"]
