"""What reaches the loss is what the file holds, token for token, and a difference stops the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.train.token_checksum import TrainedTokens
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
from tests.servers import Watcher

pytestmark = pytest.mark.torch

Assemble = Callable[..., tuple[Any, Any]]


def batches(trainer: Any) -> list[dict[str, Any]]:
    return list(trainer.get_train_dataloader())


def test_batches_hold_the_saved_ids_and_masks(assemble: Assemble, pairs: Path) -> None:
    """Each row of each batch is prompt ++ side with the saved mask, padding aside; tool tokens are not trained."""
    rows = read_table(pairs, PAIRS).to_pylist()
    trainer, _ = assemble()
    seen = set()
    for batch in batches(trainer):
        n = len(batch["rows"])
        for line in range(2 * n):
            row = rows[batch["rows"][line % n]]
            side = "chosen" if line < n else "rejected"
            ids = row["prompt_ids"] + row[f"{side}_ids"]
            mask = [0] * len(row["prompt_ids"]) + row[f"{side}_mask"]
            length = int(batch["attention_mask"][line].sum())
            assert batch["input_ids"][line, :length].tolist() == ids
            assert batch["completion_mask"][line].tolist() == mask + [0] * (len(batch["input_ids"][line]) - length)
            seen.add((row["pair_id"], side))
    assert len(seen) == 2 * len(rows)


def change(trainer: Any, pair: int, column: str, changed: Callable[[np.ndarray], Any]) -> None:
    """Train other values in a column of the chosen side of a pair than its file holds."""
    from datasets import Dataset

    rows = trainer.train_dataset.with_format(None).to_list()
    rows[pair][column][0] = changed(np.array(rows[pair][column][0])).tolist()
    trainer.train_dataset = Dataset.from_list(rows).with_format("numpy")


def flip_one_id(trainer: Any) -> None:
    trained = np.flatnonzero(trainer.data.lists("loss_mask")[6])
    change(trainer, 3, "input_ids", lambda ids: np.bitwise_xor(ids, np.arange(len(ids)) == trained[0]))


def shift_one_mask(trainer: Any) -> None:
    change(trainer, 2, "loss_mask", lambda mask: np.roll(mask, -1))


def lose_one_pair(trainer: Any) -> None:
    trainer.train_dataset = trainer.train_dataset.select(range(len(trainer.data) - 1))


def train_one_twice(trainer: Any) -> None:
    trainer.train_dataset = trainer.train_dataset.select([0, *range(1, len(trainer.data) - 1), 0])


@pytest.mark.parametrize("fault", [flip_one_id, shift_one_mask, lose_one_pair, train_one_twice])
def test_one_wrong_token_stops_the_run(assemble: Assemble, fault: Callable[[Any], None]) -> None:
    """One id, one mask shifted by one, a pair lost or doubled: refused before the first step, and by the epoch as well."""
    trainer, token_checksum = assemble()
    fault(trainer)
    with pytest.raises(OutsideError, match="other tokens than the file"):
        token_checksum.dry_run_batches(trainer)
    with pytest.raises(OutsideError, match="other tokens than the file"):
        trainer.train()
    assert not token_checksum.epochs


def test_stock_trl_would_train_other_tokens(policy: Path, pairs: Path, tmp_path: Path, assemble: Assemble) -> None:
    """On the text of the same rows TRL's own DPOTrainer trains other ids, and tool output among them."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from gymdata.commands.train.token_checksum import sequence_keys, token_proofs, trained_tokens

    rows = read_table(pairs, PAIRS).to_pylist()
    text = [
        {k: [{"role": m["role"], "content": m["content"]} for m in row[k]] for k in ("prompt", "chosen", "rejected")}
        for row in rows
    ]
    stock = DPOTrainer(
        str(policy),
        args=DPOConfig(str(tmp_path / "stock"), bf16=False, use_cpu=True, report_to="none", max_length=None),
        train_dataset=Dataset.from_list(text),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    keys = sequence_keys(f"{row['pair_id']}/{side}" for row in rows for side in ("chosen", "rejected"))
    total = TrainedTokens()
    for index, row in enumerate(stock.train_dataset):
        batch = stock.data_collator([row])
        line, position = np.nonzero(batch["completion_mask"].numpy())
        ids = batch["input_ids"].numpy()[line, position]
        total += trained_tokens(token_proofs(keys[2 * index + line], position), {"input_ids": ids})
    _, token_checksum = assemble()
    assert total.differing(token_checksum.expected) == ["input_ids"]
    assert total.count > token_checksum.expected.count


def test_first_loss_is_ln_2_whichever_reference(assemble: Assemble) -> None:
    """Before anything is learned the policy is the reference: computed beforehand or beside the policy, the loss is ln 2."""
    for beforehand in (True, False):
        trainer, _ = assemble(settings={"precompute_ref_log_probs": beforehand})
        loss = trainer.compute_loss(trainer.model, batches(trainer)[0])
        assert loss.item() == pytest.approx(math.log(2), abs=1e-6)


def test_the_progress_of_scoring_is_reported_before_the_first_step(assemble: Assemble) -> None:
    """Batch by batch, up to all pairs; nothing is scored during the training."""
    trainer, _ = assemble(settings={"precompute_ref_batch_size": 5}, progress=(watch := Watcher()))
    trainer.train()
    scored = [(counts["scored"], counts["total"]) for counts in watch.counts if "scored" in counts]
    assert scored == [(5, 13), (10, 13), (13, 13)]
    assert all("scored" in counts for counts in watch.counts[:3])


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "sft"])
def test_weighted_loss_with_equal_weights_is_trls(assemble: Assemble, kind: str) -> None:
    """With weight 1 and margin 0 our weighted loss and its gradient are TRL's, for each loss that can be weighted."""
    import torch

    # TRL's sigmoid knows no smoothing.
    smoothing = 0.1 if kind == "robust" else 0.0
    chosen = {"loss_type": [kind, "hinge"], "loss_weights": [0.7, 0.3], "label_smoothing": smoothing}
    trainer, _ = assemble(settings=chosen)
    trainer.reference = trainer.reference + np.random.default_rng(0).normal(size=trainer.reference.shape)
    batch = dict(batches(trainer)[0])
    rows = batch.pop("rows")
    known = torch.from_numpy(trainer.reference[rows]).float()
    batch["ref_chosen_logps"], batch["ref_rejected_logps"] = known.unbind(1)
    results = []
    read = {name: batch.pop(name) for name in ("weight", "margin")}
    for loss in (trainer.stock_loss(trainer.model, batch), trainer.weighted_loss(trainer.model, batch, read)):
        trainer.model.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
        results.append((loss.item(), gradient))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_weight_and_margin_enter_the_loss(policy: Path, tmp_path: Path, assemble: Assemble, make_pairs: Any) -> None:
    """A weight multiplies its pair's loss, and a margin m makes the first sigmoid loss −log σ(−m)."""
    weights = [float(i % 3) for i in range(13)]
    margins = [0.5 * (i + 1) for i in range(13)]
    file = make_pairs(weight=weights, margin=margins)
    trainer, _ = assemble(file, margin_scale=0.1)
    for batch in batches(trainer):
        expected = np.mean([weights[r] * math.log1p(math.exp(0.1 * margins[r])) for r in batch["rows"]])
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected, rel=1e-4)


def test_losses_that_cannot_be_weighted_are_refused(assemble: Assemble, make_pairs: Any) -> None:
    """A loss over sorted batches has no place for a pair's weight; saying so beats ignoring the weight."""
    file = make_pairs(weight=[0.5] * 13)
    with pytest.raises(UsageError, match="aot"):
        assemble(file, settings={"loss_type": "aot"})
    assemble(file, settings={"loss_type": "aot"}, pair_weights=False)


def test_settings_are_sorted_and_checked() -> None:
    """A key reaches its class as the declared type; a wrong, unknown or reserved key is a usage error that helps."""
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.model_config import ModelConfig

    from gymdata.commands.train.trainer_settings import fields_of, sort_settings

    classes = {"trainer": fields_of(DPOConfig), "model": fields_of(ModelConfig)}
    assert sort_settings({"bf16": "auto"}, classes)["trainer"] == {"bf16": "auto"}
    given = {"learning_rate": "1e-6", "beta": 1, "loss_type": "sigmoid", "lora_r": 8, "use_peft": True}
    assert sort_settings(given, classes) == {
        "trainer": {"learning_rate": 1e-6, "beta": 1.0, "loss_type": ["sigmoid"]},
        "model": {"lora_r": 8, "use_peft": True},
    }
    for key, value, says in (
        ("learning_rte", 1, "learning_rate"),
        ("margin_scal", 1, "margin_scale"),
        ("learning_rate", "fast", "float"),
        ("bf16", "maybe", "bool"),
        ("dataloader_drop_last", True, "every pair is trained"),
    ):
        with pytest.raises(UsageError, match=says):
            sort_settings({key: value}, classes, own=["margin_scale"])
