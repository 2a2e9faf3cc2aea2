"""Short trainings in this process that may stop on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gymdata.train.trainers.metrics import read_metrics


def curve(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row}


class Crash(TrainerCallback):
    """Ends training as a crash would, just after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("crash")
