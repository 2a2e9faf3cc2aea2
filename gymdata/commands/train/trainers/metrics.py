"""Reports of a training run, during and after it: its progress, and metrics.jsonl."""

from __future__ import annotations

# ruff: noqa: ARG002 - a callback is given more than it needs
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gymdata.commands.train.trainers.token_check_callback import TokenChecksumCallback
from gymdata.progress import Progress
from gymdata.public import Figures
from gymdata.store.lines import read_metrics
from gymdata.store.lock import sync
from gymdata.store.run_json import write_text

METRICS = "metrics.jsonl"
#: Figures that are shown during training, by the names under which the trainers log them.
FIGURES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "rewards/margins": "margin",
    "margin": "margin",
    "explained_variance": "explained_variance",
    "kl/sampler": "kl",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
}


class Recorder(TrainerCallback):
    """Writes each log entry to metrics.jsonl and reports each step, with its figures."""

    def __init__(self, folder: Path, token_checksum: TokenChecksumCallback, progress: Progress) -> None:
        self.file, self._progress = folder / METRICS, progress
        self._token_checksum = token_checksum
        self._began = time.monotonic()
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began, self._first_step, self._token_checksum.tokens_fed = time.monotonic(), state.global_step, 0
        if state.is_world_process_zero:
            self._report(args, state)
            # A stopped training has logged its totals; the final ones come later.
            rows = (row for row in read_metrics(self.file) if "train_runtime" not in row)
            # Figures of an epoch's end are measured again when due.
            earlier = [row for row in rows if row.get("step", 0) < state.global_step + (not _held_out(row))]
            write_text(self.file, "".join(json.dumps(row) + "\n" for row in earlier if state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Of a step that is logged the figures follow; a line before them would have those of an earlier step.
        if state.is_world_process_zero and not control.should_log:
            self._report(args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Figures | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        passed = time.monotonic() - self._began
        row = {"step": state.global_step, "epoch": state.epoch, "elapsed_s": round(passed, 3)}
        # After a resume, transformers divides the loss of the new steps by the number of all steps.
        wrong = {"train_loss"} if self._first_step else set()
        for key, value in logs.items():
            if key not in row and key not in wrong:
                number = value.item() if hasattr(value, "item") else value
                row[key] = str(number) if isinstance(number, float) and not math.isfinite(number) else number
        if "loss" in row:
            row["tokens_per_s"] = round(self._tokens(args) / passed, 1) if passed > 0 else None
            self._report(args, state, **figures_of(row))
        with self.file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Who resumes from the checkpoint has the rows up to its step from here.
        if state.is_world_process_zero and self.file.exists():
            sync(self.file)

    def _report(self, args: Any, state: Any, **figures: float) -> None:
        self._progress.update(done=state.global_step, total=state.max_steps, tokens=self._tokens(args), **figures)

    def _tokens(self, args: Any) -> int:
        """Tokens without padding since training began; the other processes have about as many as this one."""
        return int(self._token_checksum.tokens_fed * args.world_size)


def figures_of(row: Figures) -> dict[str, float]:
    """The finite numbers of a row of metrics.jsonl that are shown, by the names that they are shown under."""
    return {name: row[key] for key, name in FIGURES.items() if isinstance(row.get(key), (int, float))}


def summary(rows: Sequence[Figures]) -> Figures:
    """``first`` and ``last``: each figure's mean over the first and the last tenth (at least one) of the logged steps;
    ``tokens_per_s``: tokens without padding, since the training was begun or resumed."""
    logged = [row for row in rows if "loss" in row]
    if not logged:
        return {}
    n = -(-len(logged) // 10)

    def means(part: Sequence[Figures]) -> dict[str, float]:
        figures = [figures_of(row) for row in part]
        values = {name: [f[name] for f in figures if name in f] for name in dict.fromkeys(FIGURES.values())}
        return {name: sum(some) / len(some) for name, some in values.items() if some}

    return {"first": means(logged[:n]), "last": means(logged[-n:]), "tokens_per_s": logged[-1].get("tokens_per_s")}


class StopOnSignal(TrainerCallback):
    """The first Ctrl-C, for which ``note`` is the handler, finishes the step, saves a checkpoint and stops; the second
    quits."""

    stopped = False

    def note(self, *_: Any) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped:
            control.should_save = True
            control.should_training_stop = True


def _held_out(row: Figures) -> bool:
    return any(name.startswith("heldout/") for name in row)
