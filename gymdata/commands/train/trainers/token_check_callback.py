"""Watches what a trainer trains and compares it with the file: the proof of trained tokens, kept while training runs.

Invariants: what is counted are the labels of the very tensors that the loss is computed from, on every process and
in every accumulation step; an epoch that trained other tokens than the file holds stops the run. The count survives a
checkpoint, so a resumed epoch is still proven whole.
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

from gymdata.commands.train.pair_data import NamedSequences
from gymdata.commands.train.token_checksum import TokenFacts, TrainedTokens, trained_tokens
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
    """Counts trained tokens of one epoch after another.

    ``sides``: sequences per row of the dataset (2 for pairs, sequence ``sides·row + s``).
    """

    def __init__(self, sequences: NamedSequences, sides: int, expected: TrainedTokens) -> None:
        self.sequences = sequences
        self.sides = sides
        self.expected = expected
        self.rows = len(sequences) // sides
        self.before: TrainedTokens | None = None
        self.epochs: list[EpochFacts] = []
        #: Tokens of all batches that were trained on, padding left out, for the speed.
        self.tokens_fed = 0
        self._forget()

    def _forget(self) -> None:
        self._seen, self._due, self._rows_seen = TrainedTokens(), TrainedTokens(), 0

    def count(self, batch: Batch) -> None:
        """Count one batch that is about to be trained on."""
        seen, due, rows = self._of(batch)
        self.tokens_fed += int((batch[SEGMENTS] >= 0).sum() if SEGMENTS in batch else batch["attention_mask"].sum())
        self._seen, self._due, self._rows_seen = self._seen + seen, self._due + due, self._rows_seen + rows

    def dry_run_batches(self, trainer: Any, limit: float = math.inf) -> TrainedTokens:
        """Run the trainer's own data loader once, without the model; raises when its batches are not the file.

        It stops after ``limit`` trained tokens of a process, and raises when they are not what the file has for their rows.
        """
        with torch.random.fork_rng(devices=[]):
            seen, due, rows = TrainedTokens(), TrainedTokens(), 0
            loader = trainer.get_train_dataloader()
            for batch in loader:
                part, part_due, n = self._of(batch)
                seen, due, rows = seen + part, due + part_due, rows + n
                if seen.count >= limit:
                    loader.end()  # after breaking off, it would be mistaken for the training loader
                    break
        seen, due, rows = _summed(trainer.accelerator, seen, due, rows)
        self.before = seen
        complete = limit == math.inf or rows == self.rows
        if seen != due or (complete and (seen != self.expected or rows != self.rows)):
            raise self._mismatch("the batches", seen, rows)
        return seen

    def bind(self, trainer: Any) -> None:
        self._accelerator, self._trainer = trainer.accelerator, trainer

    def restore(self, checkpoint: Path) -> None:
        """Continue from the counts in a checkpoint."""
        proof = json.loads((checkpoint / MARKER).read_text())
        self.epochs = proof["epochs"]
        if proof["num_tokens"] is not None:
            self._trainer._total_train_tokens = proof["num_tokens"]
        seen, due, rows = TrainedTokens.from_json(proof["seen"]), TrainedTokens.from_json(proof["due"]), proof["rows"]
        if rows == self.rows:
            self._close_epoch(seen, due, rows)
        elif self._accelerator.is_main_process:
            self._seen, self._due, self._rows_seen = seen, due, rows

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seen, due, rows = _summed(self._accelerator, self._seen, self._due, self._rows_seen)
        if not self._accelerator.is_main_process:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / MARKER).unlink(missing_ok=True)
        files = {str(path.relative_to(folder)): hash_file(path) for path in folder.rglob("*") if path.is_file()}
        proof = {"seen": seen.as_json(), "due": due.as_json(), "rows": rows, "epochs": self.epochs, "files": files}
        # TRL's count of num_tokens in metrics.jsonl, which its own checkpoints forget.
        proof["num_tokens"] = getattr(self._trainer, "_total_train_tokens", None)
        temporary = folder / f".{MARKER}"
        temporary.write_text(json.dumps({**proof, "xxh3": _hash_of(proof)}))
        temporary.replace(folder / MARKER)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seen, due, rows = _summed(self._accelerator, self._seen, self._due, self._rows_seen)
        # The trainer's own count of epochs says whether this one was broken off (max_steps, Ctrl-C) or should be whole.
        self._close_epoch(seen, due, rows, stopped=abs(state.epoch - round(state.epoch)) > 1e-6)

    def _close_epoch(self, seen: TrainedTokens, due: TrainedTokens, rows: int, stopped: bool = False) -> None:
        self._forget()
        complete = rows == self.rows
        if seen != due or (complete and seen != self.expected) or not (complete or stopped):
            raise self._mismatch(f"epoch {len(self.epochs) + 1}", seen, rows)
        self.epochs.append({**seen.as_json(), "rows": rows, "whole": complete, "equal": True})

    def as_json(self) -> dict[str, object]:
        """For run.json. ``batches``: what one whole epoch trained; of a run shorter than an epoch, what it trained."""
        whole_epoch = next((e for e in self.epochs if e["whole"]), None)
        last = whole_epoch or (self.epochs[-1] if self.epochs else None)
        return {
            "file": self.expected.as_json(),
            "batches": {"count": last["count"], "checksum": last["checksum"]} if last else None,
            "equal": whole_epoch is not None and TrainedTokens.from_json(whole_epoch) == self.expected,
            "before_first_step": self.before.as_json() if self.before else None,
            "epochs": self.epochs,
        }

    def _of(self, batch: Batch) -> tuple[TrainedTokens, TrainedTokens, int]:
        """(trained in this batch, due by the file for its rows, its rows without fillers)."""
        rows = batch[ROWS]
        ids = batch["input_ids"].cpu().numpy()
        mask = batch["completion_mask"].cpu().numpy()
        line, position = np.nonzero(mask[:, 1:])  # position 0 has nothing before it: the loss never reads it
        position += 1
        which = np.concatenate([self.sides * (rows % self.rows) + side for side in range(self.sides)])
        if SEGMENTS in batch:
            owner, offset = batch[SEGMENTS][line, position], batch["position_ids"].cpu().numpy()[line, position]
        else:
            owner, offset = which[line], position
        seen = trained_tokens(self.sequences.keys[owner], offset, ids[line, position])
        real = which[np.tile(rows < self.rows, self.sides)]
        counts, sums = self.sequences.by_sequence
        due = TrainedTokens(int(counts[real].sum()), int(sums[real].sum(dtype=np.uint64)))
        return seen, due, int((rows < self.rows).sum())

    def _mismatch(self, what: str, seen: TrainedTokens, rows: int) -> OutsideError:
        return OutsideError(
            "trainer",
            f"{what} hold other tokens than the file: {seen} in {counted(rows, 'row')}; the file has {self.expected} in "
            f"{counted(self.rows, 'row')}",
            hint="do not trust this model; it is a defect in gymdata or a library: report it with the versions in run.json",
        )


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


def _summed(
    accelerator: Any, seen: TrainedTokens, due: TrainedTokens, rows: int
) -> tuple[TrainedTokens, TrainedTokens, int]:
    """Totals over all processes. Sums of int64 wrap, which is the addition mod 2⁶⁴ that checksums need."""
    if accelerator.num_processes == 1:
        return seen, due, rows
    values = np.array([seen.count, seen.checksum, due.count, due.checksum, rows], dtype=np.uint64).view(np.int64)
    here = torch.from_numpy(values).to(accelerator.device)
    summed = accelerator.gather(here).view(-1, 5).sum(dim=0).cpu().numpy().view(np.uint64)
    count, checksum, due_count, due_checksum, n = (int(v) for v in summed)
    return TrainedTokens(count, checksum), TrainedTokens(due_count, due_checksum), n
