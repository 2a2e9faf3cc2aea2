"""``gymdata train-*`` killed in each state that the files of the command and of its trainer pass through."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from tests.forks import TRAINING, Forks, forks
from tests.kills import Killed

pytestmark = [pytest.mark.torch, pytest.mark.spread, pytest.mark.full, pytest.mark.timeout(1200)]

SAMPLE = Path(__file__).parents[2] / "sample_data"
SETTINGS = {"max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 1}
#: Columns of metrics.jsonl that tell of time, or of one process only.
_TIMES = {"elapsed_s", "tokens_per_s", "train_runtime", "train_loss", "total_flos"}
_TIMES |= {"train_samples_per_second", "train_steps_per_second"}
_FACTS = (
    "stage", "status", "config", "parents", "model", "counts", "trained_tokens", "steps", "heldout", "ratio", "settings",
)  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        # What a trainer's environment has is read when its libraries are loaded.
        for name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
            patch.setenv(name, "1")
        with forks(*TRAINING) as made:
            yield made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each trainer reads."""
    folder, rollouts = tmp_path_factory.mktemp("sources"), SAMPLE / "rollouts" / "clean.jsonl"
    assert main(["pairs", str(rollouts), "-o", str(folder / "pairs")]) == 0
    assert main(["experience", str(rollouts), "-o", str(folder / "experiences")]) == 0
    assert main(["experience", str(rollouts), "--estimator", "gae", "-o", str(folder / "returns")]) == 0
    of = {"dpo": "pairs", "reward": "pairs", "rl": "experiences", "value": "returns"}
    return {
        name: folder / of[name] if name in of else rollouts for name in ("dpo", "kto", "reward", "rl", "sft", "value")
    }


def held(work: Path) -> dict[str, Any]:
    """Every file below the folder with its bytes, and names of folders; of what tells of time, the rest."""
    content: dict[str, Any] = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        if path.is_dir() or path.name in ("trainer.log", "gymdata.log"):
            content[name] = "there"
        elif path.name == "run.json":
            facts = json.loads(path.read_text())
            content[name] = {key: facts.get(key) for key in _FACTS}
        elif path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            content[name] = [{key: value for key, value in row.items() if key not in _TIMES} for row in rows]
        else:
            content[name] = path.read_bytes()
    return content


def killed(algorithm: str, source: Path, processes: Forks, folder: Path, *more: str, **settings: int) -> Killed:
    words = [f"train-{algorithm}", str(source), "-m", str(SAMPLE / "policy"), "-o", str(folder / "work" / "out"), *more]
    options = [f"--set={name}={value}" for name, value in (SETTINGS | settings).items()]
    return Killed(processes, folder, [*words, *options], held)


#: What is there once a training has prepared its data, was begun, saved its model, and is finished.
_STAGES = ("job/data/prepared", "job/job.json", "model.safetensors", "SUCCESS")


def stage(files: Path) -> Hashable:
    """How far a training has come."""
    out = files / "out"
    checkpoints = sorted(proof.parent.name for proof in out.glob("checkpoints/*/gymdata_proof.json"))
    return *checkpoints, *((out / name).exists() for name in _STAGES)


def line_and_stage(what: str, files: Path) -> Hashable:
    """The line that would change a file, whether it leaves one empty or half written, and how far the training has come.
    Which file does not matter where prepared data is made again whatever is there of it."""
    line, _, cut = what.partition(", ")
    name, _, size = cut.removesuffix(" bytes").rpartition(" of ")
    return line, "" if "prepared.py" in line else name, size == "0", stage(files)


def test_a_training_that_was_killed_anywhere_finishes(
    sources: dict[str, Path], processes: Forks, tmp_path: Path
) -> None:
    """Killed before each line that changes a file, at each stage of a training that saves two checkpoints and of one that
    resumes from the first: the same command ends with the metrics, proof and weights of a training that nobody killed, and
    with nothing more."""
    training = killed("dpo", sources["dpo"], processes, tmp_path)
    wrong, tried = training.faults(
        moment=line_and_stage, again=lambda files: (files / "out/checkpoints/checkpoint-1/gymdata_proof.json").exists()
    )
    assert wrong == []
    assert tried > 50


@pytest.mark.parametrize("algorithm", ["kto", "reward", "rl", "value"])
def test_every_trainer_goes_on_from_each_stage(
    algorithm: str, sources: dict[str, Path], processes: Forks, tmp_path: Path
) -> None:
    """What is another trainer's own: its figures, held-out ones too, before each line of the metrics in two epochs, and the
    files that it writes itself; else one state of each stage."""
    epochs = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 8}
    training = killed(algorithm, sources[algorithm], processes, tmp_path, **epochs)

    def moment(what: str, files: Path) -> Hashable:
        return stage(files), what if "on_log" in what or f"{algorithm}.py" in what else ""

    wrong, tried = training.faults(moment=moment)
    assert wrong == []
    assert tried > 10


def test_a_training_that_starts_again_and_was_killed(
    sources: dict[str, Path], processes: Forks, tmp_path: Path
) -> None:
    """--overwrite over a finished training, killed before each change that the command makes: repeated, it starts again."""
    training = killed("sft", sources["sft"], processes, tmp_path)
    training.over = ["--overwrite"]

    def names(_: str, files: Path) -> Hashable:
        # Prepared data is made again whatever is there of it.
        return frozenset(str(path.relative_to(files)) for path in files.rglob("*") if path.parent.name != "data")

    wrong, tried = training.faults(lambda what: what.startswith("command"), moment=names)
    assert wrong == []
    assert tried > 10
