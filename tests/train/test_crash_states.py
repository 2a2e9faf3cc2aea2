"""A power cut or a kill at any moment of a training: the same command ends with the weights of one that nobody disturbed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.train.trainers.run import last_checkpoint
from tests.crash_states import Recording, Tree, put, recording
from tests.forks import TRAINING, forks, run
from tests.kills import kill_when

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.timeout(1200)]

SAMPLE = Path(__file__).parents[2] / "sample_data"
ROLLOUTS = SAMPLE / "rollouts" / "clean.jsonl"
MARKER = "gymdata_proof.json"
#: Columns of metrics.jsonl that tell of time, or of one process only.
TIMES = {
    "elapsed_s", "tokens_per_s", "train_runtime", "train_loss", "total_flos", "train_samples_per_second",
    "train_steps_per_second",
}  # fmt: skip
FACTS = ("stage", "status", "config", "model", "counts", "trained_tokens", "steps", "heldout", "settings")
SETTINGS = {"max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 1}


@dataclass
class Training:
    """A command that trains: its function in Python, and what it reads."""

    function: Callable[..., Any]
    source: Path

    def __call__(self, out: Path, **more: Any) -> None:
        self.function(self.source, model=SAMPLE / "policy", output=out, **SETTINGS, **more)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    folder = tmp_path_factory.mktemp("sources")
    gymdata.pairs(ROLLOUTS, output=folder / "pairs")
    gymdata.experience(ROLLOUTS, output=folder / "experiences")
    gymdata.experience(ROLLOUTS, output=folder / "returns", estimator="gae")
    return {
        "sft": Training(gymdata.train_sft, ROLLOUTS),
        "dpo": Training(gymdata.train_dpo, folder / "pairs"),
        "kto": Training(gymdata.train_kto, ROLLOUTS),
        "reward": Training(gymdata.train_reward, folder / "pairs"),
        "rl": Training(gymdata.train_rl, folder / "experiences"),
        "value": Training(gymdata.train_value, folder / "returns"),
    }


def held(out: Path) -> dict[str, Any]:
    """Names of all files but logs; the bytes of the model's; rows of metrics and run.json without times."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".log":
            continue
        if path.is_dir() or name == "job/job.json":
            found[name] = "there"
        elif name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
        elif name == "run.json":
            facts = json.loads(path.read_text())
            found[name] = {key: facts.get(key) for key in FACTS if key != "config"}
        else:
            found[name] = path.read_bytes()
    return found


def checkpoints_of(tree: Tree) -> dict[str, Tree]:
    found = tree.get("out", {}).get("checkpoints", {})
    return {name: inside for name, inside in found.items() if isinstance(inside, dict)}


def saved_checkpoints(made: Recording) -> dict[str, Tree]:
    """Each checkpoint as it was when its marker was written."""
    saved: dict[str, Tree] = {}
    for tree in made.moments():
        for name, checkpoint in checkpoints_of(tree).items():
            if MARKER in checkpoint:
                saved.setdefault(name, checkpoint)
    return saved


def stage(tree: Tree) -> Hashable:
    """How far a training has come, by the files that say so and by the checkpoints that are there."""
    out = tree.get("out", {})
    there = [name for name, checkpoint in checkpoints_of(tree).items() if MARKER in checkpoint]
    return (
        *there,
        *(name in out for name in ("run.json", "model.safetensors", "SUCCESS")),
        "job.json" in out.get("job", {}),
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [("dpo", {}), ("rl", {}), ("kto", {}), ("reward", {}), ("value", {}), ("sft", {"overwrite": True})],
)
def test_a_training_is_the_same_after_a_power_cut(
    name: str, more: dict[str, Any], trainings: dict[str, Training], tmp_path: Path
) -> None:
    """In every state that one can leave, a checkpoint that would be resumed from is as it was saved, and a training that is
    said to be finished has its model; from three stages, drawn, the same command ends as if nothing had happened."""
    train, out, left = trainings[name], tmp_path / "work" / "out", tmp_path / "left"
    out.parent.mkdir()
    if more:
        train(out)
    with recording(out.parent) as made:
        train(out, **more)
    expected, saved = held(out), saved_checkpoints(made)
    assert len(saved) == 2
    by_stage: dict[Hashable, list[Tree]] = {}
    for tree, _ in made.states(4 if name == "dpo" else 2):
        by_stage.setdefault(stage(tree), []).append(tree)
        shutil.rmtree(left, ignore_errors=True)
        put(tree, left)
        checkpoint = last_checkpoint(left / "out" / "checkpoints")
        assert checkpoint is None or checkpoints_of(tree)[checkpoint.name] == saved[checkpoint.name]
        if (left / "out" / "SUCCESS").exists():
            assert (left / "out" / "model.safetensors").read_bytes() == expected["model.safetensors"]
    rng = random.Random(name)
    for trees in rng.sample(sorted(by_stage.values(), key=len), 3):
        shutil.rmtree(left, ignore_errors=True)
        put(rng.choice(trees), left)
        train(left / "out", **more)
        assert held(left / "out") == expected


def test_a_training_that_was_killed_resumes(trainings: dict[str, Training], tmp_path: Path) -> None:
    """A real SIGKILL once its first checkpoint is complete: the same command ends with the same weights and metrics."""
    train, out = trainings["dpo"], tmp_path / "out"
    train(tmp_path / "whole")
    words = ["train-dpo", str(train.source), "-m", str(SAMPLE / "policy"), "-o", str(out)]
    words += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    with forks(*TRAINING) as processes:
        first = processes.start(run, words, tmp_path / "said")
        assert kill_when(first.pid, (out / "checkpoints" / "checkpoint-1" / MARKER).exists)
        assert not (out / "SUCCESS").exists()
        assert processes.start(run, words, tmp_path / "said").wait() == 0
    assert held(out) == held(tmp_path / "whole")
