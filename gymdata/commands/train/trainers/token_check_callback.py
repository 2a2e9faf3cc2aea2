"""Watches what a trainer trains and compares it with the file: the proof of trained tokens, kept while training runs.

Invariants: what is counted are the very tensors that the loss is computed from, on every process and in every
accumulation step; the first batch that is not what is due of its rows stops the run, as does an epoch that is not all rows
once. The count survives a checkpoint, so a resumed epoch is still proven whole.
"""

from __future__ import annotations

# ruff: noqa: ARG002 - a callback is given more than it needs
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import TrainerCallback

from gymdata.commands.train.data import TrainingData
from gymdata.commands.train.token_checksum import (
    CONTEXT,
    IDS,
    TokenFacts,
    TrainedTokens,
    hashes,
    token_proofs,
    trained_tokens,
)
from gymdata.commands.train.trainers.batches import ROWS, SEGMENTS, Batch
from gymdata.errors import OutsideError, counted
from gymdata.store import hash_file

#: Written last into a checkpoint: a checkpoint without it was interrupted while being saved. It has the hash of every
#: file, and of itself.
MARKER = "gymdata_proof.json"


class EpochFacts(TokenFacts):
    """What one epoch trained, ``whole`` or broken off."""

    rows: int
    whole: bool
    equal: bool


class TokenChecksumCallback(TrainerCallback):
    """Counts trained tokens of one epoch after another, and compares each batch with what is due of its rows."""

    def __init__(self, data: TrainingData, expected: TrainedTokens) -> None:
        self.data, self.sides, self.rows, self.expected = data, data.sides, len(data), expected
        self.before: TrainedTokens | None = None
        self.epochs: list[EpochFacts] = []
        #: Tokens of all batches that were trained on, padding left out, for the speed.
        self.tokens_fed = 0
        self._forget()

    def _forget(self) -> None:
        """Begin an epoch, of which no batch was seen."""
        self._seen, self._rows_seen, self._batches = TrainedTokens(), 0, 0
        #: The rows that this process saw since it began the epoch, or resumed within it.
        self._met = np.zeros(self.rows, np.bool_)

    def count(self, batch: Batch) -> None:
        """Count one batch that is about to be trained on. Raises OutsideError when it is not what is due."""
        self.tokens_fed += int((batch[SEGMENTS] >= 0).sum() if SEGMENTS in batch else batch["attention_mask"].sum())
        self._add(batch)

    def dry_run_batches(self, trainer: Any, limit: float = math.inf) -> TrainedTokens:
        """Run the trainer's own data loader once, without the model; raises when its batches are not the file.

        It stops after ``limit`` trained tokens of a process, all of which were compared.
        """
        self._forget()
        with torch.random.fork_rng(devices=[]):
            loader = trainer.get_train_dataloader()
            for batch in loader:
                self._add(batch)
                if self._seen.count >= limit:
                    loader.end()  # after breaking off, it would be mistaken for the training loader
                    break
        self.before, rows = self._summed(trainer.accelerator)
        if limit == math.inf or rows == self.rows:
            self._require_whole(self.before, rows)
        self._forget()
        return self.before

    def bind(self, trainer: Any) -> None:
        self._accelerator, self._trainer = trainer.accelerator, trainer

    def restore(self, checkpoint: Path) -> None:
        """Continue from the counts in a checkpoint."""
        proof = json.loads((checkpoint / MARKER).read_text())
        self.epochs, self._batches = proof["epochs"], proof["batches"]
        if proof["num_tokens"] is not None:
            self._trainer._total_train_tokens = proof["num_tokens"]
        seen, rows = TrainedTokens.from_json(proof["seen"]), proof["rows"]
        if rows == self.rows:
            self._close_epoch(seen, rows)
        elif self._accelerator.is_main_process:
            self._seen, self._rows_seen = seen, rows

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seen, rows = self._summed(self._accelerator)
        if not self._accelerator.is_main_process:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / MARKER).unlink(missing_ok=True)
        files = {str(path.relative_to(folder)): hash_file(path) for path in folder.rglob("*") if path.is_file()}
        proof = {"seen": seen.as_json(), "rows": rows, "batches": self._batches, "epochs": self.epochs, "files": files}
        # TRL's count of num_tokens in metrics.jsonl, which its own checkpoints forget.
        proof["num_tokens"] = getattr(self._trainer, "_total_train_tokens", None)
        temporary = folder / f".{MARKER}"
        temporary.write_text(json.dumps({**proof, "xxh3": _hash_of(proof)}))
        temporary.replace(folder / MARKER)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seen, rows = self._summed(self._accelerator)
        # The trainer's own count of epochs says whether this one was broken off (max_steps, Ctrl-C) or should be whole.
        self._close_epoch(seen, rows, stopped=abs(state.epoch - round(state.epoch)) > 1e-6)

    def _close_epoch(self, seen: TrainedTokens, rows: int, stopped: bool = False) -> None:
        if rows == self.rows or not stopped:
            self._require_whole(seen, rows)
        self._forget()
        self.epochs.append({**seen.as_json(), "rows": rows, "whole": rows == self.rows, "equal": True})

    def as_json(self) -> dict[str, object]:
        """For run.json. ``batches``: what one whole epoch trained; of a run shorter than an epoch, what it trained."""
        whole_epoch = next((e for e in self.epochs if e["whole"]), None)
        last = whole_epoch or (self.epochs[-1] if self.epochs else None)
        return {
            "file": self.expected.as_json(),
            "batches": {name: last[name] for name in ("count", "checksum", "columns")} if last else None,
            "equal": whole_epoch is not None,
            "before_first_step": self.before.as_json() if self.before else None,
            "epochs": self.epochs,
        }

    def _add(self, batch: Batch) -> None:
        """Count a batch. Raises OutsideError for a row that this epoch has had, and for other tokens than are due."""
        self._batches += 1
        real, times = np.unique(batch[ROWS][batch[ROWS] < self.rows], return_counts=True)
        again = real[(times > 1) | self._met[real]]
        if len(again):
            raise self._unequal(f"has rows of this epoch again (first: {self.data.name(self.sides * again[0])})")
        self._met[real] = True
        seen = self._tokens(batch)
        sums = {name: int(column[real].sum(dtype=np.uint64)) for name, column in self.data.due.items()}
        due = TrainedTokens(int(self.data.n_trained[real].sum()), sums)
        if seen != due:
            differing = ", ".join(due.differing(seen))
            raise self._unequal(f"has {seen}, and the file has {due} in these {counted(len(real), 'row')}: {differing}")
        self._seen, self._rows_seen = self._seen + seen, self._rows_seen + len(real)

    def _tokens(self, batch: Batch) -> TrainedTokens:
        """The trained tokens of a batch and their context, by the tensors that the loss is computed from."""
        trained = batch["completion_mask"].cpu().numpy() != 0
        trained[:, 0] = False  # nothing is before it: the loss never reads it
        if SEGMENTS in batch:
            line, position = np.nonzero(batch[SEGMENTS] >= 0)
            owner = batch[SEGMENTS][line, position]
            offset = batch["position_ids"].cpu().numpy()[line, position]
        else:
            rows = np.tile(batch[ROWS], self.sides)
            line, position = np.nonzero((batch["attention_mask"].cpu().numpy() != 0) & (rows < self.rows)[:, None])
            sides = np.repeat(np.arange(self.sides), len(batch[ROWS]))
            owner, offset = (self.sides * rows + sides)[line], position
        proofs, ids = token_proofs(self.data.keys[owner], offset), batch[IDS].cpu().numpy()[line, position]
        of_token = trained[line, position]
        context = int(hashes(proofs[~of_token], ids[~of_token]).sum(dtype=np.uint64))
        line, position = line[of_token], position[of_token]
        columns = {IDS: ids[of_token]}
        for name in self.data.due.keys() - {IDS, CONTEXT}:
            # A number per row, of which pairs have two lines, or one for each position but the first.
            tensor = batch[name].cpu().numpy()
            columns[name] = tensor[line % len(tensor)] if tensor.ndim == 1 else tensor[line, position - 1]
        return trained_tokens(proofs[of_token], columns) + TrainedTokens(0, {CONTEXT: context})

    def _require_whole(self, seen: TrainedTokens, rows: int) -> None:
        """Raises OutsideError when the batches of an epoch, each of which was compared, are not all of the file."""
        if (seen, rows) != (self.expected, self.rows):
            raise self._unequal(
                f"ends the epoch with {seen} in {counted(rows, 'row')}, and the file has {self.expected} in "
                f"{counted(self.rows, 'row')}"
            )

    def _unequal(self, what: str) -> OutsideError:
        place = f"batch {self._batches} of epoch {len(self.epochs) + 1}"
        return OutsideError(
            "trainer",
            f"trained tokens: NOT EQUAL: other tokens than the file: {place} {what}",
            hint="do not trust this model; it is a defect in gymdata or a library: report it with the versions in run.json",
        ).at(place)

    def _summed(self, accelerator: Any) -> tuple[TrainedTokens, int]:
        """Tokens and rows of all processes. Sums of int64 wrap, which is the addition mod 2⁶⁴ that checksums need."""
        seen, rows = self._seen, self._rows_seen
        if accelerator.num_processes == 1:
            return seen, rows
        names = list(self.data.due)
        numbers = [seen.count, rows, *(seen.checksums.get(name, 0) for name in names)]
        here = torch.from_numpy(np.array(numbers, np.uint64).view(np.int64)).to(accelerator.device)
        summed = accelerator.gather(here).view(-1, len(numbers)).sum(dim=0).cpu().numpy().view(np.uint64)
        count, rows, *sums = (int(number) for number in summed)
        return TrainedTokens(count, dict(zip(names, sums, strict=True))), rows


def damaged_file(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that is not as it was saved; None where all are."""
    try:
        proof = json.loads((checkpoint / MARKER).read_text())
        if proof.pop("xxh3") != _hash_of(proof):
            return MARKER
        files: dict[str, str] = proof["files"]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return MARKER
    for name, xxh3 in files.items():
        try:
            if hash_file(checkpoint / name) != xxh3:
                return name
        except OSError:
            return name
    return None


def _hash_of(proof: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(proof, sort_keys=True).encode())
