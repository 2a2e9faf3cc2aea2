"""Each trainer in two real processes, with a whole model in each and with one that is sharded between them."""

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
        job = {"num_processes": 2, "shard_model": kind.startswith("sharded")}
        with accelerate_shards(kind.startswith("accelerate")):
            if kind.endswith("resumed"):
                given |= {"save_strategy": "steps", "save_steps": 1}
                stopped, _ = start(algorithm, Path(file), Path(policy), folder, given, **job)
                stopped.add_callback(Crash(2))
                try:
                    stopped.train()
                except RuntimeError as error:
                    assert "crash" in str(error), error
            trainer, token_checksum = start(algorithm, Path(file), Path(policy), folder, given, **job)
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
    """The same of two processes, each with the whole model, and with a model that was loaded sharded."""
    return trained_by_two(one, policy, "whole", "sharded")


@pytest.fixture(scope="module")
def two_more(one: Path, policy: Path) -> Path:
    """The same with a model that accelerate shards, and with either that is resumed from a checkpoint."""
    return trained_by_two(one, policy, "accelerate", "sharded-resumed", "accelerate-resumed")


def trained_by_two(out: Path, policy: Path, *kinds: str) -> Path:
    files = (out / "files.json").read_text()
    in_two_processes(
        TWO, out, json.dumps(kinds), files, json.dumps(str(policy)), json.dumps(str(out)), json.dumps(SETTINGS)
    )
    return out


def figures(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("kind", ["accumulated", "whole", "sharded"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_however_a_step_is_split_it_is_the_same(two: Path, algorithm: str, kind: str) -> None:
    """Steps of 8 rows as 4 and 4, as 4 in each of two processes and as 4 in each half of a sharded model: the same losses,
    gradients and weights."""
    assert_same_training(two / f"{algorithm}-one", two / f"{algorithm}-{kind}")


@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_two_processes_train_every_token_once(two: Path, algorithm: str, kind: str) -> None:
    """The proof of two processes, before the first step and of each epoch, is the file's."""
    assert_proven(two / f"{algorithm}-{kind}")


@pytest.mark.parametrize("kind", ["accelerate", "sharded-resumed", "accelerate-resumed"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_sharding_by_accelerate_and_resuming_are_the_same(two_more: Path, algorithm: str, kind: str) -> None:
    """With accelerate's FSDP2, and after a crash between checkpoints with either sharding: losses, gradients, weights and
    proof of one process that was not stopped."""
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


@pytest.mark.parametrize(
    ("job", "environment", "expected"),
    [
        ({"num_processes": 1}, {}, []),
        ({"num_processes": 4}, {}, ["launch", "--multi_gpu", "--num_processes", "4", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]),
        ({"num_processes": 1, "accelerate_config": "/f.yaml"}, {}, ["launch", "--config_file", "/f.yaml"]),
        ({"num_processes": 16, "accelerate_config": "/f.yaml", "machine_rank": 1}, {},
         ["launch", "--config_file", "/f.yaml", "--num_processes", "16", "--machine_rank", "1"]),
        ({"num_processes": 2, "launcher": "torchrun"}, {}, ["--nproc_per_node", "2", "--standalone"]),
        ({"num_processes": 1, "launcher": "torchrun"}, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}, []),
        ({"num_processes": 8, "launcher": "torchrun", "machine_rank": 1}, {"PET_NNODES": "2"},
         ["--nproc_per_node", "8", "--node_rank", "1"]),
    ],
)  # fmt: skip
def test_what_the_launcher_is_given(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], environment: dict[str, str], expected: list[str]
) -> None:
    """What the settings do not say is left to the file of accelerate and to the variables of torchrun."""
    from gymdata.commands.train.trainers.run import launcher

    for name in ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher(job)[1:] == expected


def test_two_machines_train_one_model(policy: Path, tmp_path: Path) -> None:
    """The same command on two machines: the first one's report has the proof of all processes, the other took part, and the
    model is there."""
    file = file_for("rl", policy, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["train-rl", file, "-m", policy, "-o", tmp_path / "out", "--json", "--launcher", "torchrun", "--shard-model",
             "--set", "num_train_epochs=1", "--set", "per_device_train_batch_size=2"]  # fmt: skip
    code = "import sys; from gymdata.cli.main import main; sys.exit(main(sys.argv[1:]))"
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PET_NNODES": "2", "PET_NODE_RANK": str(rank),
                            "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [machine.communicate() for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert (first["status"], second["status"]) == ("completed", "took part")
    assert first["trained_tokens"]["equal"] is True
    assert first["settings"]["seed"] == 42
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "output is written by rank 0" in said[1][1]
