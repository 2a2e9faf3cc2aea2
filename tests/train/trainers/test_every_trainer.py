"""What holds for every trainer: the proof, resuming bit for bit, and a bad loss that names its rollouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.train.run import train
from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.train.trainers.metrics import read_metrics
from gymdata.errors import OutsideError, RefusedError
from gymdata.models.model_identity import ModelFacts
from gymdata.progress import NullProgress
from gymdata.store import read_run_json, write_run_json
from tests.servers import Watcher
from tests.train.trainers.conftest import file_for, pair_rows, start, write_pairs
from tests.train.trainers.running import Crash, curve

pytestmark = pytest.mark.torch

Begin = Callable[..., tuple[Any, Any]]
EVERY = sorted(TRAINERS)


@pytest.fixture
def begin(policy: Path, tmp_path: Path) -> Begin:
    """A trainer of any kind and its token_checksum, over a small file."""

    def build(algorithm: str, out: str = "out", settings: dict[str, Any] | None = None, **job: Any) -> tuple[Any, Any]:
        file = file_for(algorithm, policy, tmp_path)
        given = {"per_device_train_batch_size": 3, "learning_rate": 1e-3, **(settings or {})}
        return start(algorithm, file, policy, tmp_path / out, given, **job)

    return build


@pytest.mark.parametrize("algorithm", EVERY)
def test_the_proof_holds_for_every_epoch(begin: Begin, tmp_path: Path, algorithm: str) -> None:
    """Before the first step and in each of two epochs with accumulation, the file's count and checksum; metrics.jsonl has
    a finite loss of each step."""
    trainer, token_checksum = begin(algorithm, settings={"num_train_epochs": 2, "gradient_accumulation_steps": 2})
    assert token_checksum.dry_run_batches(trainer) == token_checksum.expected
    trainer.train()
    proof = token_checksum.as_json()
    assert proof["equal"] is True
    assert proof["file"]["count"] > 0
    assert proof["file"] == proof["batches"] == proof["before_first_step"] == token_checksum.expected.as_json()
    assert [epoch["checksum"] for epoch in proof["epochs"]] == [proof["file"]["checksum"]] * 2
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, trainer.state.global_step + 1))
    assert all(isinstance(row["loss"], float) for row in rows)


@pytest.mark.matrix("sft", "rl", "dpo")
@pytest.mark.parametrize("algorithm", EVERY)
def test_resuming_changes_nothing(begin: Begin, tmp_path: Path, algorithm: str) -> None:
    """After a crash between checkpoints: the losses, weights and proof of the training that was not stopped."""
    import torch

    from gymdata.commands.train.trainers.run import last_checkpoint

    settings = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2}
    trainer, token_checksum = begin(algorithm, "whole", settings)
    token_checksum.dry_run_batches(trainer)
    trainer.train()
    whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    proof = token_checksum.as_json()["epochs"]
    broken, token_checksum = begin(algorithm, "broken", settings)
    broken.add_callback(Crash(5))
    with pytest.raises(RuntimeError, match="crash"):
        broken.train()
    (tmp_path / "broken/checkpoints/checkpoint-6").mkdir()  # a checkpoint whose saving was cut off has no marker
    checkpoint = last_checkpoint(tmp_path / "broken/checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-4"
    resumed, token_checksum = begin(algorithm, "broken", settings)
    token_checksum.dry_run_batches(resumed)
    token_checksum.restore(checkpoint)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.model.state_dict().items())
    assert token_checksum.as_json()["epochs"] == proof
    # Without its optimizer a checkpoint would be gone on from all the same, to other weights.
    last = last_checkpoint(tmp_path / "broken/checkpoints")
    assert last is not None
    (last / "optimizer.pt").unlink()
    before = last_checkpoint(tmp_path / "broken/checkpoints")
    assert before is not None
    assert int(before.name.removeprefix("checkpoint-")) < int(last.name.removeprefix("checkpoint-"))


def test_a_checkpoint_with_flipped_bits_is_skipped_for_the_one_before(begin: Begin, tmp_path: Path) -> None:
    """200 bytes changed in any file of a checkpoint, its proof and state too: the file is named, and the training resumes
    from the earlier checkpoint to the weights of the training that was not stopped."""
    import torch

    from gymdata.commands.train.trainers.run import last_checkpoint

    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    trainer, _ = begin("sft", "whole", settings)
    trainer.train()
    whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    broken, _ = begin("sft", "broken", settings)
    broken.add_callback(Crash(5))
    with pytest.raises(RuntimeError, match="crash"):
        broken.train()
    checkpoints = tmp_path / "broken" / "checkpoints"
    files = [path for path in sorted((checkpoints / "checkpoint-4").rglob("*")) if path.is_file()]
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "gymdata_proof.json"} <= {f.name for f in files}
    for file in files:
        saved, notes = file.read_bytes(), list[str]()
        file.write_bytes(flipped(saved))
        assert last_checkpoint(checkpoints, notes.append) == checkpoints / "checkpoint-2"
        assert f"checkpoint-4: {file.name} is not as it was saved" in notes[0]
        if file is not files[-1]:
            file.write_bytes(saved)
    resumed, token_checksum = begin("sft", "broken", settings)
    token_checksum.restore(checkpoints / "checkpoint-2")
    resumed.train(resume_from_checkpoint=str(checkpoints / "checkpoint-2"))
    assert all(torch.equal(value, whole[name]) for name, value in resumed.model.state_dict().items())
    assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-6"
    (checkpoints / "checkpoint-6" / "gymdata_proof.json").unlink()
    assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-4"


def flipped(content: bytes) -> bytes:
    """With 200 bytes in the middle, or all of fewer, changed."""
    begin = max(0, len(content) // 2 - 100)
    return content[:begin] + bytes(byte ^ 0x15 for byte in content[begin : begin + 200]) + content[begin + 200 :]


def test_a_checkpoint_that_names_no_hashes_is_not_resumed(tmp_path: Path) -> None:
    """One of an earlier version, or one whose proof is no longer JSON: nothing shows that its files are those saved."""
    from gymdata.commands.train.trainers.run import last_checkpoint

    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    for text in ('{"seen": {}, "files": {"model.safetensors": 12}}', "{", "[]"):
        (folder / "gymdata_proof.json").write_text(text)
        assert last_checkpoint(tmp_path) is None


def test_the_group_of_processes_is_gone_after_the_end(begin: Begin) -> None:
    """What a trainer communicates through is closed while the interpreter still runs."""
    from torch import distributed

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    trainer, _ = begin("sft")
    trainer.end()
    assert not distributed.is_initialized()


@pytest.mark.matrix("dpo", "rl")
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_bad_loss_names_its_rollouts(begin: Begin, policy: Path, algorithm: str) -> None:
    """Weights gone to NaN stop the very step, with the rollouts of its batch and of no other."""
    import torch

    trainer, _ = begin(algorithm)
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(float("nan"))
    seen: list[str] = []
    count = trainer.token_checksum.count

    def noted(batch: dict[str, Any]) -> None:
        seen.extend(trainer.data.rollouts_of(batch["rows"]))
        count(batch)

    trainer.token_checksum.count = noted
    with pytest.raises(OutsideError, match="loss became nan at step 1, on rollouts") as caught:
        trainer.train()
    assert 0 < len(seen) < sum(trainer.data.counts.values())
    assert str(caught.value).splitlines()[0].endswith(f"on rollouts {', '.join(seen)}")


@pytest.mark.matrix("dpo")
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_bad_gradient_stops_its_step(begin: Begin, algorithm: str) -> None:
    """A gradient whose norm is infinite would be clipped to nothing, and the training would end as if it had learned: it
    stops at that step, with the rollouts of all of its batches, and the weights are as they were."""
    import torch

    trainer, _ = begin(algorithm, settings={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2})
    rows: list[int] = []
    count = trainer.token_checksum.count
    trainer.token_checksum.count = lambda batch: (rows.extend(batch["rows"].tolist()), count(batch))
    weights = list(trainer.model.parameters())
    before = [weight.detach().clone() for weight in weights]
    weights[-1].register_hook(lambda gradient: torch.full_like(gradient, 1e30))
    with pytest.raises(OutsideError, match="norm of the gradient became inf at step 1, on rollouts") as caught:
        trainer.train()
    assert caught.value.exit_code == 3
    assert "those with a huge advantage" in str(caught.value)
    assert len(rows) == 4
    named = str(caught.value).splitlines()[0].partition("on rollouts ")[2].split(", ")
    assert sorted(named) == sorted(trainer.data.rollouts_of(np.unique(rows)))
    assert all(torch.equal(weight, was) for weight, was in zip(weights, before, strict=True))


@pytest.mark.matrix("1")
@pytest.mark.parametrize("bad", [1, 99])
def test_steps_that_loss_scaling_leaves_out_are_counted(begin: Begin, bad: int) -> None:
    """With fp16 an infinite gradient is part of finding the scale: some such steps are a warning, nothing but them an
    error."""
    import torch

    trainer, _ = begin("sft", progress=(notes := Watcher()))
    trainer.args.fp16 = True
    seen: list[int] = []

    def spoil(gradient: Any) -> Any:
        seen.append(1)
        return torch.full_like(gradient, 1e30) if len(seen) <= bad else gradient

    list(trainer.model.parameters())[-1].register_hook(spoil)
    trainer.train()
    steps = trainer.state.global_step
    assert steps > 1
    if bad == 1:
        trainer.report_skipped()
        assert f"warning: 1 of {steps} steps changed nothing: their gradients were infinite" in notes.said[-1]
    else:
        with pytest.raises(OutsideError, match=f"{steps} of {steps} steps changed nothing"):
            trainer.report_skipped()


def told_file(algorithm: str, policy: Path, folder: Path) -> Path:
    """The same small files, leading back to a run that was sampled with tokenizer ``tokens``."""
    identity = {"tokenizer_hash": "tokens", "chat_template_hash": "template", "logprobs_mode": "processed_logprobs"}
    table = TRAINERS[algorithm].table.name
    if table == "pairs":
        return write_pairs(folder, pair_rows(policy), identity)
    file = file_for(algorithm, policy, folder)
    if table == "rollouts":
        write_run_json(file, {**read_run_json(file), "identity": identity})
    else:
        write_run_json(folder / "run", {"run_id": "run", "identity": identity})
        write_run_json(
            file.parent, {"stage": "experiences", "parents": [{"path": str(folder / "run"), "run_id": "run"}]}
        )
    return file


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize(
    ("facts", "settings", "says"),
    [
        ({"tokenizer_hash": "others"}, {}, "sampled with tokenizer tokens, model has others"),
        ({"vocab_size": 30}, {}, "T206"),
        ({"max_length": 4}, {}, "reads at most 4"),
        ({}, {"max_length": 2}, "P601|T205"),
    ],
    ids=["tokenizer", "vocabulary", "too-long", "max-length"],
)
def test_unfit_files_never_reach_a_process(
    policy: Path, tmp_path: Path, algorithm: str, facts: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    """Another tokenizer, ids out of the vocabulary, sequences too long, a limit below every prompt: refused at once."""
    file = told_file(algorithm, policy, tmp_path)
    known = {"tokenizer_hash": "tokens", "chat_template_hash": "template", "vocab_size": 4096, "max_length": 256}
    model = ModelFacts(**{"path": "model", "policy_hash": "policy", **known, **facts})
    config = TRAINERS[algorithm].load(None, {"model": "model", "output": tmp_path / "out", **settings})

    def never(*_: Any) -> Any:
        raise AssertionError("a process was started")

    with pytest.raises(RefusedError, match=says):
        train(file, config, model=model, run_job=never, progress=NullProgress())
    assert not (tmp_path / "out").exists()
