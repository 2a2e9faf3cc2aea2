"""Batches that are not what the file holds: the first of them stops the training, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.train.settings import TRAINERS
from gymdata.errors import OutsideError
from tests.train.trainers.conftest import file_for, start

pytestmark = pytest.mark.torch

Batch = dict[str, Any]
Examples = list[dict[str, int]]
#: Rows of a batch, and the batch of an epoch that has the fault.
SIZE, FAULTY = 3, 2


def shifted(batch: Batch, _: list[str]) -> None:
    batch["input_ids"] = batch["input_ids"].roll(1, dims=1)


def cut(batch: Batch, _: list[str]) -> None:
    line, position = batch["completion_mask"].nonzero()[-1].tolist()
    batch["completion_mask"][line, position] = batch["attention_mask"][line, position] = 0


def swapped(batch: Batch, _: list[str]) -> None:
    for name in ("input_ids", "attention_mask", "completion_mask"):
        batch[name] = batch[name].flip(0)


def other_mask(batch: Batch, _: list[str]) -> None:
    line, position = batch["completion_mask"].nonzero()[-1].tolist()
    batch["completion_mask"][line, [1, position]] = batch["completion_mask"][line, [position, 1]]


def other_rows_numbers(batch: Batch, read: list[str]) -> None:
    for name in read:
        batch[name] = batch[name].roll(1, dims=0) if batch[name].is_floating_point() else ~batch[name]


TENSORS: dict[str, Callable[[Batch, list[str]], None]] = {
    "shift": shifted, "cut": cut, "swap": swapped, "other mask": other_mask, "other row's numbers": other_rows_numbers,
}  # fmt: skip
ROWS: dict[str, Callable[[Examples], Examples]] = {
    "doubled": lambda examples: [examples[0], *examples[:-1]],
    "dropped": lambda examples: examples[:-1],
}
FAULTS = (*TENSORS, *ROWS, "other epoch")


@pytest.mark.matrix(*(f"rl-{fault}" for fault in FAULTS))
@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [  # SFT reads ids alone: the numbers of its rows are all 1
        (name, fault)
        for name in sorted(TRAINERS)
        for fault in FAULTS
        if (name, fault) != ("sft", "other row's numbers")
    ],
)
def test_a_planted_fault_stops_the_training_at_its_batch(
    policy: Path, tmp_path: Path, algorithm: str, fault: str
) -> None:
    """Ids shifted by one, a token cut off, two rows exchanged, another mask, numbers of other rows, a row twice, a row left
    out, a batch of the epoch before: NOT EQUAL, and the first batch that shows it."""
    file = file_for(algorithm, policy, tmp_path, weight=[1.0 + i for i in range(13)])
    given = {"num_train_epochs": 2, "per_device_train_batch_size": SIZE}
    trainer, _ = start(algorithm, file, policy, tmp_path / "out", given)
    batches, collate, calls = len(trainer.get_train_dataloader()), trainer.data_collator, list[Examples]()
    read = [name for name in trainer.data.due if not name.endswith("_ids")]

    def faulty(examples: Examples) -> Any:
        calls.append(examples)
        if fault == "other epoch" and len(calls) == batches + FAULTY:
            return collate(calls[0])
        if fault == "other epoch" or len(calls) != FAULTY:
            return collate(examples)
        batch = collate(ROWS[fault](examples) if fault in ROWS else examples)
        if fault in TENSORS:
            TENSORS[fault](batch, read)
        return batch

    trainer.data_collator = faulty
    with pytest.raises(OutsideError, match="trained tokens: NOT EQUAL: other tokens than the file") as caught:
        trainer.train()
    # A row that is left out is missed when the epoch ends, one of another epoch when it comes again.
    batch, _, epoch = str(caught.value.where).partition(" of ")
    assert epoch == ("epoch 2" if fault == "other epoch" else "epoch 1")
    assert fault == "other epoch" or batch == f"batch {batches if fault == 'dropped' else FAULTY}"
    assert trainer.state.global_step < 2 * batches
