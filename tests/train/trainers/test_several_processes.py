"""Each trainer in two real processes, with a whole model in each and with one that accelerate shards between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.train.trainers.metrics import read_metrics
from tests.train.trainers.conftest import file_for, start
from tests.train.trainers.running import gymdata

pytestmark = [pytest.mark.torch, pytest.mark.full]

ROOT = Path(__file__).parents[3]
EVERY = sorted(TRAINERS)
#: Rows that divide neither among two processes nor into steps of eight.
SETTINGS = {"num_train_epochs": 2, "learning_rate": 1e-3, "use_cpu": True}
#: What each of two processes does: every trainer in every way of ``kinds``.
TWO = """
import json, sys
from pathlib import Path
from tests.train.trainers.conftest import start
from tests.train.trainers.running import Crash, accelerate_shards
from gymdata.commands.train.trainers.run import last_checkpoint, save_model

kinds, files, policy, out, settings = (json.loads(word) for word in sys.argv[1:])
for kind in kinds:
    for algorithm, file in files.items():
        given = {**settings, "per_device_train_batch_size": 4, "ddp_backend": "gloo"}
        folder = Path(out) / f"{algorithm}-{kind}"
        with accelerate_shards(kind.startswith("accelerate")):
            if kind.endswith("resumed"):
                given |= {"save_strategy": "steps", "save_steps": 1}
                stopped, _ = start(algorithm, Path(file), Path(policy), folder, given)
                stopped.add_callback(Crash(2))
                try:
                    stopped.train()
                except RuntimeError as error:
                    assert "crash" in str(error), error
            trainer, token_checksum = start(algorithm, Path(file), Path(policy), folder, given)
            token_checksum.dry_run_batches(trainer)
            checkpoint = last_checkpoint(Path(trainer.args.output_dir))
            if checkpoint is not None:
                token_checksum.restore(checkpoint)
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            save_model(trainer, {"model": policy}, folder)
            if trainer.is_world_process_zero():
                held = {**token_checksum.as_json(), "from": checkpoint and checkpoint.name}
                (folder / "proof.json").write_text(json.dumps(held))
trainer.end()
"""


def in_two_processes(script: str, folder: Path, *words: object) -> None:
    """Run a script twice, as ranks 0 and 1 of one group of processes."""
    (folder / "two.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TRL_EXPERIMENTAL_SILENCE": "1", "WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = []
    for rank in ("0", "1"):
        with (folder / f"log-{rank}").open("wb") as log:
            ranks.append(
                subprocess.Popen([sys.executable, str(folder / "two.py"), *map(str, words)], cwd=ROOT, stdout=log,
                                 stderr=log, env={**common, "RANK": rank, "LOCAL_RANK": rank})
            )  # fmt: skip
    codes = [process.wait() for process in ranks]
    assert codes == [0, 0], "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in (0, 1))


@pytest.fixture(scope="module")
def one(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every trainer's folder ``ALGORITHM-KIND``, of one process in steps of 8 and of 4 and 4; ``files.json`` beside them."""
    from gymdata.commands.train.trainers.run import save_model

    out = tmp_path_factory.mktemp("trained")
    weights, files = [0.5 + i % 3 for i in range(13)], {}
    for algorithm in EVERY:
        (out / algorithm).mkdir()
        files[algorithm] = str(file_for(algorithm, policy, out / algorithm, weight=weights))
    for algorithm, file in files.items():
        for kind, size, micro in (("one", 8, 1), ("accumulated", 4, 2)):
            given = {**SETTINGS, "per_device_train_batch_size": size, "gradient_accumulation_steps": micro}
            trainer, _ = start(algorithm, Path(file), policy, out / f"{algorithm}-{kind}", given)
            trainer.train()
            save_model(trainer, {"model": str(policy)}, out / f"{algorithm}-{kind}")
    (out / "files.json").write_text(json.dumps(files))
    return out


@pytest.fixture(scope="module")
def two(one: Path, policy: Path) -> Path:
    """The same of two processes, each with the whole model."""
    return trained_by_two(one, policy, "whole")


@pytest.fixture(scope="module")
def two_more(one: Path, policy: Path) -> Path:
    """The same with a model that accelerate shards, and resumed from a checkpoint."""
    return trained_by_two(one, policy, "accelerate", "accelerate-resumed")


def trained_by_two(out: Path, policy: Path, *kinds: str) -> Path:
    files = (out / "files.json").read_text()
    in_two_processes(
        TWO, out, json.dumps(kinds), files, json.dumps(str(policy)), json.dumps(str(out)), json.dumps(SETTINGS)
    )
    return out


def figures(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("kind", ["accumulated", "whole"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_however_a_step_is_split_it_is_the_same(two: Path, algorithm: str, kind: str) -> None:
    """Steps of 8 rows as 4 and 4, and as 4 in each of two processes: the same losses, gradients and weights."""
    assert_same_training(two / f"{algorithm}-one", two / f"{algorithm}-{kind}")


@pytest.mark.parametrize("algorithm", EVERY)
def test_two_processes_train_every_token_once(two: Path, algorithm: str) -> None:
    """The proof of two processes, before the first step and of each epoch, is the file's."""
    assert_proven(two / f"{algorithm}-whole")


@pytest.mark.parametrize("kind", ["accelerate", "accelerate-resumed"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_sharding_by_accelerate_and_resuming_are_the_same(two_more: Path, algorithm: str, kind: str) -> None:
    """With accelerate's FSDP2, and after a crash between checkpoints: losses, gradients, weights and proof of one process
    that was not stopped."""
    folder = two_more / f"{algorithm}-{kind}"
    assert_same_training(two_more / f"{algorithm}-one", folder)
    assert_proven(folder)
    assert json.loads((folder / "proof.json").read_text())["from"] == ("checkpoint-1" if "resumed" in kind else None)


def assert_same_training(one: Path, other: Path) -> None:
    import torch
    from safetensors.torch import load_file

    assert len(figures(one, "loss")) >= 2
    for name in ("loss", "grad_norm"):
        assert figures(other, name) == pytest.approx(figures(one, name), rel=1e-5, abs=1e-5)
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in expected.items())


def assert_proven(folder: Path) -> None:
    proof: dict[str, Any] = json.loads((folder / "proof.json").read_text())
    assert proof["equal"] is True
    assert proof["before_first_step"] == proof["file"]
    assert [epoch["checksum"] for epoch in proof["epochs"]] == [proof["file"]["checksum"]] * 2


def launched(*words: object) -> subprocess.CompletedProcess[str]:
    """``accelerate launch -m gymdata WORDS`` in two processes on the CPU."""
    launcher = [
        sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, "-m", "gymdata", *map(str, words)], cwd=ROOT, capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("algorithm", ["dpo", "rl"])
def test_accelerate_launch_trains_one_model(algorithm: str, policy: Path, tmp_path: Path) -> None:
    """The command in two processes prints one report, with the proof of both and the weights of a training in one; again,
    it is finished; what is wrong is said by the first process, and none is left waiting."""
    file = file_for(algorithm, policy, tmp_path)
    words = [f"train-{algorithm}", file, "-m", policy, "--json", "--set", "num_train_epochs=1"]
    done = launched(*words, "-o", tmp_path / "out", "--set", "per_device_train_batch_size=2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["trained_tokens"]["equal"]) == ("completed", True)
    assert done.stderr.count("trained tokens: ") == 1
    one = gymdata(*words, "-o", tmp_path / "one", "--set", "per_device_train_batch_size=4", "--set", "use_cpu=true")
    assert one.returncode == 0, one.stderr
    assert_same_training(tmp_path / "one", tmp_path / "out")
    again = launched(*words, "-o", tmp_path / "out", "--set", "per_device_train_batch_size=2")
    assert (again.returncode, again.stderr.count("this training is finished")) == (0, 1)
    refused = launched(*words, "-o", tmp_path / "out", "--set", "per_device_train_batch_size=3")
    assert refused.returncode != 0
    assert "was made with other settings" in refused.stderr
