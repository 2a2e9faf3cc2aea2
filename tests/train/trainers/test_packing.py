"""Packed rows: what is trained is what is trained unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.train.prepared import prepare
from gymdata.commands.train.settings import TRAINERS
from gymdata.errors import OutsideError
from tests.rollout_files import BRANCH, BREAK, rollout, two_turns, write_run
from tests.train.trainers.conftest import start
from tests.train.trainers.running import assert_same, loss_and_gradients

pytestmark = pytest.mark.torch


def mixed_run(folder: Path) -> Path:
    """Chains, a break and a branch: sequences of several lengths, with tool tokens inside."""
    shapes = [two_turns(5, 40), BREAK, two_turns(6, 41), BRANCH, [([1, 2, 3], [4, 9, 9, 9, 9, 2])], two_turns(7, 42)]
    return write_run(folder, [rollout(f"t{i}", 0, 1.0, calls) for i, calls in enumerate(shapes)])


def test_every_sequence_is_in_one_row_that_holds_it(tmp_path: Path) -> None:
    """TRL's rows have each sequence of the file once and whole, with the number of its row for each token."""
    from gymdata.commands.train.trainers.batches import SEGMENTS, packed_rows

    config: Any = TRAINERS["sft"].load(None, {"model": "model", "output": "out"})
    data = prepare(tmp_path / "data", config.parts(str(mixed_run(tmp_path / "run")), 2))
    seen: list[int] = []
    for row in packed_rows(data, 24):
        assert len(row["input_ids"]) == sum(row["seq_lengths"]) <= 24
        for ids, mask, numbers in zip(
            *(np.split(row[name], np.cumsum(row["seq_lengths"])[:-1]) for name in ("input_ids", "loss_mask", SEGMENTS)),
            strict=True,
        ):
            assert len(set(numbers)) == 1
            assert ids.tolist() == data.lists("input_ids")[numbers[0]].tolist()
            assert mask.tolist() == data.lists("loss_mask")[numbers[0]].tolist()
            seen.append(int(numbers[0]))
    assert sorted(seen) == list(range(len(data)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_is_unpacked(policy: Path, tmp_path: Path, size: int) -> None:
    """Loss and gradients of the whole file are those of one sequence a row, whatever the number of rows in a batch."""
    file = mixed_run(tmp_path / "run")
    plain, _ = start("sft", file, policy, tmp_path / "out", {"per_device_train_batch_size": 1})
    settings = {"per_device_train_batch_size": size}
    packed, _ = start("sft", file, policy, tmp_path / "out", settings, packing=True, pack_length=32)
    assert len(packed.train_dataset) < len(plain.train_dataset) == len(packed.data)
    assert_same(loss_and_gradients(packed), loss_and_gradients(plain), 1e-5)


def test_flat_rows_are_the_same(policy: Path, tmp_path: Path) -> None:
    """All rows in one, as flash attention needs it, give the same loss and gradients and hold the proof."""
    file = mixed_run(tmp_path / "run")
    trainers = [start("sft", file, policy, tmp_path / "out", {}, packing=True, pack_length=24) for _ in range(2)]
    (flat, token_checksum), (plain, _) = trainers
    flat.data_collator.flat = True
    assert next(iter(flat.get_train_dataloader()))["input_ids"].shape[0] == 1
    assert token_checksum.dry_run_batches(flat) == token_checksum.expected
    assert_same(loss_and_gradients(flat), loss_and_gradients(plain), 1e-5)


def test_the_proof_sees_into_packed_rows(policy: Path, tmp_path: Path) -> None:
    """Packed batches have the file's count and checksum; one id changed in a row is noticed."""
    file = mixed_run(tmp_path / "run")
    trainer, token_checksum = start("sft", file, policy, tmp_path / "out", {}, packing=True)
    unpacked, other = start("sft", file, policy, tmp_path / "out", {})
    assert token_checksum.dry_run_batches(trainer) == token_checksum.expected == other.dry_run_batches(unpacked)
    trainer.train()
    assert token_checksum.as_json()["equal"] is True
    collate = trainer.data_collator

    def wrong(examples: Any) -> Any:
        batch = collate(examples)
        line, position = batch["completion_mask"].nonzero()[-1].tolist()
        batch["input_ids"][line, position] += 1
        return batch

    trainer.data_collator = wrong
    with pytest.raises(OutsideError, match="other tokens than the file"):
        token_checksum.dry_run_batches(trainer)
