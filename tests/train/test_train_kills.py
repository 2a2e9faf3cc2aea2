"""``gymdata train-*`` killed in each state that the files of the command and of its trainer pass through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.rollouts.schema import ANNOTATIONS
from gymdata.store import read_table
from tests.forks import TRAINING, Forks, forks
from tests.kills import Killed, run
from tests.rollout_files import rollout, two_turns, write_run

pytestmark = [pytest.mark.torch, pytest.mark.spread]

SAMPLE = Path(__file__).parents[2] / "sample_data"
ALGORITHMS = ("sft", "dpo", "kto", "reward", "rl", "value")
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
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each trainer reads."""
    folder, rollouts = tmp_path_factory.mktemp("given"), SAMPLE / "rollouts" / "clean.jsonl"
    assert main(["pairs", str(rollouts), "-o", str(folder / "pairs")]) == 0
    assert main(["experience", str(rollouts), "-o", str(folder / "experiences")]) == 0
    assert main(["experience", str(rollouts), "--estimator", "gae", "-o", str(folder / "returns")]) == 0
    of = {"dpo": "pairs", "reward": "pairs", "rl": "experiences", "value": "returns"}
    return {name: folder / of[name] if name in of else rollouts for name in ALGORITHMS}


def held(work: Path) -> dict[str, Any]:
    """Every file of a training with its bytes, and names of folders; of what tells of time, the rest."""
    found: dict[str, Any] = {}
    for path in sorted((work / "out").rglob("*")):
        name = str(path.relative_to(work))
        if path.is_dir() or path.name in ("trainer.log", "gymdata.log", "result.json"):
            found[name] = "there"
        elif path.name == "run.json":
            facts = json.loads(path.read_text())
            found[name] = {key: facts.get(key) for key in _FACTS}
        elif path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in _TIMES} for row in rows]
        else:
            found[name] = path.read_bytes()
    return found


def killed(algorithm: str, given: dict[str, Path], processes: Forks, folder: Path, **more: int) -> Killed:
    words = [f"train-{algorithm}", str(given[algorithm]), "-m", str(SAMPLE / "policy")]
    words += ["-o", str(folder / "work" / "out")]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 1} | more
    options = [f"--set={name}={value}" for name, value in settings.items()]
    return Killed(processes, folder, [*words, *options], held, [1])


@pytest.mark.full
def test_held_out_figures_of_a_killed_training_are_there_once(
    given: dict[str, Path], processes: Forks, tmp_path: Path
) -> None:
    """Killed before each line of the metrics, in two epochs: the same command ends with the same lines."""
    training = killed(
        "reward", given, processes, tmp_path, max_steps=-1, num_train_epochs=2, per_device_train_batch_size=4
    )
    wrong, tried = training.faults(lambda what: "on_log" in what)
    assert wrong == []
    assert tried > 5


def beside_its_run(words: list[str], root: Path, *rest: Any) -> int:
    """``run`` of a training whose rollouts lie beside it, where what it writes there is killed, too."""
    if not (root / "run").exists():
        write_run(root / "run", [rollout("ab"[i % 2], i, float(i), two_turns(5 + i, 40)) for i in range(8)])
    return run(words, root, *rest)


def annotated(work: Path) -> dict[str, Any]:
    """Names below both folders, but of logs; and the rows that are beside the rollouts."""
    names = [str(path.relative_to(work)) for path in sorted(work.rglob("*")) if path.suffix != ".log"]
    return {"names": names, "rows": repr(read_table(work / "run", ANNOTATIONS).to_pylist())}


@pytest.mark.full
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_annotations_of_a_training_that_was_killed(everywhere: bool, processes: Forks, tmp_path: Path) -> None:
    """With --annotate, killed at each place where its files change: the same command ends with each row once, and nothing
    left over."""
    words = ["train-sft", str(tmp_path / "work" / "run"), "-m", str(SAMPLE / "policy"),
             "-o", str(tmp_path / "work" / "out"), "--select", "all", "--annotate"]  # fmt: skip
    settings = ["max_steps=2", "per_device_train_batch_size=2", "save_steps=1"]
    words += [word for each in settings for word in ("--set", each)]
    seen: set[str] = set()

    def first(what: str) -> bool:
        # What is prepared and what a checkpoint holds is the business of the tests around this one.
        new = what not in seen and (everywhere or not ("prepared.py" in what or "exact.py" in what))
        seen.add(what)
        return new

    wrong, tried = Killed(processes, tmp_path, words, annotated, [1], how=beside_its_run).faults(first)
    assert wrong == []
    assert tried > 10


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_training_that_was_killed_anywhere_finishes(
    algorithm: str, given: dict[str, Path], processes: Forks, tmp_path: Path
) -> None:
    """Killed in each state of the files of a training that saves two checkpoints, and of one that resumes from the first:
    the same command ends with the metrics, proof and weights of a training that nobody killed, and with nothing more. DPO
    in every state; the others, whose checkpoints go the same way, once before each line that changes a file."""
    training, seen = killed(algorithm, given, processes, tmp_path), set[str]()

    def first(what: str) -> bool:
        new = algorithm == "dpo" or what not in seen
        seen.add(what)
        return new

    wrong, tried = training.faults(
        first, again=lambda files: (files / "out/checkpoints/checkpoint-1/gymdata_proof.json").exists()
    )
    assert wrong == []
    assert tried > 50


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_training_that_starts_again_and_was_killed(given: dict[str, Path], processes: Forks, tmp_path: Path) -> None:
    """--overwrite over a finished training, killed before each change that the command makes: repeated, it starts again."""
    training = killed("sft", given, processes, tmp_path)
    training.over = ["--overwrite"]
    wrong, tried = training.faults(lambda what: what.startswith("command"))
    assert wrong == []
    assert tried > 10
