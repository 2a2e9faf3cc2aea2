"""What the training stage refuses, announces and leaves behind, with a trainer that only takes notes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gymdata.commands.train.run import TrainReport, train
from gymdata.commands.train.settings import TrainDpoConfig, TrainKtoConfig
from gymdata.errors import OutsideError, RefusedError, StoreError, UsageError
from gymdata.models.model_identity import ModelFacts
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_run_json, write_run_json
from gymdata.store.lineage import lineage
from tests.rollout_files import write_table
from tests.servers import Watcher

MODEL = ModelFacts("model", "policy", "tokens", "template", vocab_size=50, max_length=10)
IDENTITY = {
    "policy_hash": "policy", "tokenizer_hash": "tokens", "chat_template_hash": "template", "top_p": 1.0, "top_k": 0,
    "min_p": 0.0, "logprobs_mode": "processed_logprobs", "temperature": 1.0,
}  # fmt: skip


class Trainer:
    """Stands for the trainer: notes the job, and ends as it is told."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.error = error

    def __call__(self, job: Any, progress: Any) -> dict[str, Any]:
        self.jobs.append(job)
        proof = {"file": job["trained_tokens"], "batches": job["trained_tokens"], "equal": True}
        if self.error is not None:
            raise self.error
        if not job["dry_run"]:
            (Path(job["output"]) / "checkpoints").mkdir(exist_ok=True)
        return {"trained_tokens": proof, "steps": 3}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, identity: dict[str, Any] | None = IDENTITY, **columns: Any) -> Path:
    row: dict[str, Any] = {
        "pair_id": "p0", "run_id": "r", "task_id": "t", "prompt": [], "chosen": [], "rejected": [],
        "chosen_rollout_id": "c", "rejected_rollout_id": "d", "margin": 1.0, "weight": 1.0, "source": "reward",
        "policy_hash": "policy", "policy_version": 0, "temperature": 1.0, "prompt_ids": [1, 2],
        "chosen_ids": [3, 4, 5], "rejected_ids": [3, 4, 6, 7], "chosen_mask": [1, 0, 1], "rejected_mask": [1, 0, 1, 1],
        "chosen_logprobs": [-0.5, 0.0, -0.25], "rejected_logprobs": [-1.0, 0.0, -1.0, -1.0],
    } | columns  # fmt: skip
    file = folder / "run" / "pairs-reward" / "pairs.parquet"
    schema = pa.schema([f for f in PAIRS.schema if f.name in row])
    write_table(pa.table({f.name: pa.array([row[f.name]], f.type) for f in schema}, schema=schema), file, PAIRS)
    parents = []
    if identity is not None:
        write_run_json(folder / "run", {"run_id": "r", "identity": identity})
        parents = [{"path": str(folder / "run"), "run_id": "r"}]
    write_run_json(file.parent, {"stage": "pairs", "parents": parents})
    return file


def go(
    pairs: Path, out: Path, trainer: Trainer | None = None, notes: Watcher | None = None, **options: Any
) -> dict[str, Any]:
    config = {"model": "model", "output": out} | options.pop("config", {})
    settings, command = TrainDpoConfig.load(None, config), ["gymdata", "train-dpo"]
    known = {"model": MODEL, "run_job": trainer or Trainer(), "progress": notes or Watcher(), "command": command}
    return train(pairs, settings, **{**known, **options}).run_json


def test_run_json_leads_back_to_the_rollouts(pairs: Path, tmp_path: Path) -> None:
    """A finished training says SUCCESS, holds its proof, and its lineage reaches the run that sampled the tokens."""
    facts = go(pairs, tmp_path / "out")
    assert facts == read_run_json(tmp_path / "out")
    assert (tmp_path / "out" / "SUCCESS").is_file()
    assert facts["trained_tokens"]["equal"] is True
    assert facts["trained_tokens"]["file"]["count"] == 5
    assert facts["model"]["policy_hash"] == "policy"
    assert [run.get("stage") or run["run_id"] for run in lineage(tmp_path / "out")] == ["train-dpo", "pairs", "collect"]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_another_template_is_named(pairs: Path, tmp_path: Path) -> None:
    """It only shaped the prompts, so it is a warning."""
    notes = Watcher()
    go(pairs, tmp_path / "out", notes=notes, model=ModelFacts("model", "policy", "tokens", "new", 50, 10))
    assert any("template template" in said and "has new" in said for said in notes.said)


def test_an_unknown_origin_is_said(tmp_path: Path) -> None:
    """Pairs without a run behind them train, with a warning that their tokenizer was not checked."""
    notes = Watcher()
    go(write(tmp_path, identity=None), tmp_path / "out", notes=notes)
    assert any("(pairs) names a tokenizer, which is not checked" in said for said in notes.said)


def test_too_long_is_refused_or_counted(tmp_path: Path) -> None:
    """Longer than the model reads is refused; --max-length cuts, and says what it cost; nothing left is refused."""
    file = write(tmp_path, prompt_ids=[1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(RefusedError, match=r"11 tokens, model reads at most 10.*\n.*--max-length 10"):
        go(file, tmp_path / "out")
    notes, trainer = Watcher(), Trainer()
    facts = go(file, tmp_path / "out", trainer, notes, config={"max_length": 10})
    assert trainer.jobs[0]["max_length"] == 10
    assert facts["length_limit"]["trained_tokens_lost"] == 1
    assert any("1 of 1 pair cut" in said and "1 trained tokens lost" in said for said in notes.said)
    with pytest.raises(RefusedError, match="no pair is left: 1 would be identical"):
        go(file, tmp_path / "none", config={"max_length": 9})


@pytest.mark.parametrize(
    ("columns", "identity", "says"),
    [
        ({}, {}, None),
        ({"policy_hash": "older"}, {}, "policy older"),
        ({"temperature": 0.7}, {}, "temperature 0.7"),
        ({}, {"top_p": 0.9}, "top_p 0.9"),
        ({}, {"top_k": 20}, "top_k 20"),
        ({}, {"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
        ({}, None, "nothing beside them says how they were sampled"),
        ({"chosen_logprobs": [float("nan")] * 3}, {}, "some are not known"),
    ],
)
def test_saved_reference_needs_the_same_policy_untruncated(
    tmp_path: Path, columns: dict[str, Any], identity: dict[str, Any] | None, says: str | None
) -> None:
    """--ref saved is allowed for this very policy at T=1 over its whole distribution, else refused with L304."""
    file = write(tmp_path, None if identity is None else IDENTITY | identity, **columns)
    if says is None:
        go(file, tmp_path / "out", config={"ref": "saved"})
        return
    with pytest.raises(RefusedError, match=f"L304.*{says}"):
        go(file, tmp_path / "out", config={"ref": "saved"})


def test_one_rule_for_resuming(pairs: Path, tmp_path: Path) -> None:
    """The same command resumes; other settings are refused by name; finished it does nothing; --overwrite starts again."""
    out, failing, notes = tmp_path / "out", Trainer(OutsideError("trainer", "died")), Watcher()
    with pytest.raises(OutsideError):
        go(pairs, out, failing)
    assert read_run_json(out)["status"] == "failed"
    assert not (out / "SUCCESS").exists()
    (out / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"settings\.learning_rate") as caught:
        go(pairs, out, config={"learning_rate": 1e-3})
    assert caught.value.exit_code == 2
    with pytest.raises(StoreError, match=r"settings\.learning_rate"):
        go(pairs, out, config={"learning_rate": 1e-3}, dry_run=True)
    go(pairs, out)
    idle = Trainer()
    assert go(pairs, out, idle, notes)["steps"] == 3
    assert not idle.jobs
    assert any("this training is finished, nothing to do" in said for said in notes.said)
    with pytest.raises(StoreError, match=r"settings\.learning_rate"):
        go(pairs, out, config={"learning_rate": 1e-3})
    go(pairs, out, overwrite=True, config={"learning_rate": 1e-3})
    assert read_run_json(out)["config"]["trainer"] == {"learning_rate": 1e-3}


def test_the_output_is_named_as_it_was_given(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative output folder stays relative in what is printed and in run.json; the trainer gets a whole path."""
    monkeypatch.chdir(tmp_path)
    trainer, notes = Trainer(), Watcher()
    assert go(pairs, Path("out"), trainer, dry_run=True)["config"]["output"] == "out"
    assert go(pairs, Path("out"), trainer)["config"]["output"] == "out"
    assert trainer.jobs[1]["output"] == str(tmp_path / "out")
    go(pairs, Path("out"), trainer, notes)
    assert notes.said[-1].startswith("out: this training is finished")
    with pytest.raises(StoreError, match=r"^out: was made with other settings"):
        go(pairs, Path("out"), config={"learning_rate": 1e-3})


def test_a_training_without_a_checkpoint_pins_nothing(pairs: Path, tmp_path: Path) -> None:
    """What failed before its first checkpoint can be started with other settings: nothing could be resumed."""
    out = tmp_path / "out"
    with pytest.raises(OutsideError):
        go(pairs, out, Trainer(OutsideError("trainer", "died")))
    go(pairs, out, config={"learning_rate": 1e-3})
    assert read_run_json(out)["config"]["trainer"] == {"learning_rate": 1e-3}


def test_settings_that_the_trainer_refuses_leave_no_folder(pairs: Path, tmp_path: Path) -> None:
    """Only the trainer knows some faults of settings; its refusal leaves nothing that would need --overwrite."""
    with pytest.raises(UsageError):
        go(pairs, tmp_path / "out", Trainer(UsageError("settings: no")))
    assert not (tmp_path / "out").exists()


def test_a_bad_output_is_refused_before_a_library_is_loaded(pairs: Path, tmp_path: Path) -> None:
    """A folder with other files, like a file in its place, is known without torch and TRL."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    words = ["train-dpo", str(pairs), "-m", "sample_data/policy", "--set", "learning_rte=1", "-o"]
    code = (
        "import sys; from gymdata.cli.main import main; *words, one, other = sys.argv[1:]; "
        "print([main([*words, out]) for out in (one, other)], 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, *words, str(tmp_path / "full"), str(pairs)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "[2, 2] False\n", done.stderr
    first, second = done.stderr.split("error: ")[1:]
    assert "not empty and not a training" in first
    assert "expected the name of a folder" in second


def test_an_output_that_cannot_be_written_is_refused_in_a_dry_run_too(pairs: Path, tmp_path: Path) -> None:
    """A file in the place of the folder, or above it, is found before a trainer starts."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        for dry_run in (False, True):
            trainer = Trainer()
            with pytest.raises(StoreError, match="is a file"):
                go(pairs, out, trainer, dry_run=dry_run)
            assert not trainer.jobs


@pytest.mark.parametrize("stage", [None, "judge"])
def test_a_foreign_folder_is_left_alone(pairs: Path, tmp_path: Path, stage: str | None) -> None:
    """Neither a plain start nor --overwrite touches a folder that no training wrote, with a run.json or without."""
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    if stage:
        write_run_json(out, {"stage": stage})
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=stage or "not a training"):
            go(pairs, out, overwrite=overwrite)
    assert (out / "thesis.txt").read_text() == "years of work"


def test_a_training_whose_job_is_gone_can_be_started_again(pairs: Path, tmp_path: Path) -> None:
    """Without job/job.json a training cannot be resumed, which the error says; run.json shows what it is, so that
    --overwrite starts again. A file that is not JSON is like one that is not there."""
    out = tmp_path / "out"
    go(pairs, out)
    for spoil, why in (
        (lambda: shutil.rmtree(out / "job"), "is missing"),
        (lambda: (out / "job" / "job.json").write_text("{"), "is not JSON"),
    ):
        spoil()
        (out / "model.safetensors").write_text("of the first training")
        for dry_run in (False, True):
            with pytest.raises(StoreError, match=rf"cannot be resumed: .*job/job\.json {why}") as refused:
                go(pairs, out, dry_run=dry_run)
            assert "--overwrite" in str(refused.value)
        assert go(pairs, out, overwrite=True)["status"] == "completed"
        assert not (out / "model.safetensors").exists()
        assert go(pairs, out, idle := Trainer())["status"] == "completed"
        assert not idle.jobs


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"num_train_epochs": 0}, "num_train_epochs is 0: nothing is trained"),
        ({"num_train_epochs": 0, "max_steps": 3}, None),
        ({"learning_rate": 0.0}, "learning_rate is 0: no step changes the model"),
        ({"num_train_epochs": 1, "learning_rate": 1e-6}, None),
    ],
)
def test_a_training_that_changes_nothing_is_warned_of(
    pairs: Path, tmp_path: Path, trainer: dict[str, Any], says: str | None
) -> None:
    """No epochs, or a learning rate of 0, end as they began: allowed, and a warning says so first."""
    notes = Watcher()
    go(pairs, tmp_path / "out", notes=notes, config=trainer)
    warned = [said for said in notes.said if said.startswith("warning")]
    assert (len(warned), says is None or says in warned[0]) == (0 if says is None else 1, True)


def test_kto_needs_two_rows_in_a_batch() -> None:
    """A batch of one row has nothing to compare: a mistake of usage, known without the trainer."""
    given = {"model": "m", "output": "o", "per_device_train_batch_size": 1}
    with pytest.raises(UsageError, match="per_device_train_batch_size: got 1, expected at least 2"):
        TrainKtoConfig.load(None, given)
    assert TrainKtoConfig.load(None, {**given, "loss_type": "apo_zero_unpaired"}).trainer["loss_type"]


def test_no_steps_are_no_mismatch() -> None:
    """Where nothing was trained, the report says that in place of comparing tokens, and no count that is 0 of what was
    left out."""
    counts = {"desirable": 1, "left_out_duplicate": 0, "left_out_tie": 2, "rollouts": 9, "trained_tokens": 5}
    proof = {"file": {"count": 5, "checksum": "a"}, "batches": None, "equal": False}
    report = TrainReport("kto", "completed", Path("out"), counts, proof, {}, steps=0)
    assert report.rows() == [
        ("rollouts", 9), ("desirable", 1), ("left out tie", 2), ("tokens per epoch", 5),
        ("token checksum", "nothing was trained"), ("steps", 0), ("output", Path("out")),
    ]  # fmt: skip


def test_held_out_accuracy_is_the_last_row() -> None:
    """Where tasks are held out, the report ends with what the model makes of them."""
    proof, heldout = {"file": {"count": 5, "checksum": "a"}, "equal": True}, {"accuracy": 0.75, "ci95": [0.5, 1.0]}
    report = TrainReport("reward", "completed", Path("out"), {"pairs": 8}, proof, {}, steps=2, heldout=heldout)
    assert report.rows()[-1] == ("held-out preference accuracy", "75.0 % (95 %: 50.0 to 100.0)")


def test_a_dry_run_leaves_nothing(pairs: Path, tmp_path: Path) -> None:
    """A dry run proves the batches and writes no output."""
    facts = go(pairs, tmp_path / "out", dry_run=True)
    assert facts["trained_tokens"]["equal"] is True
    assert not (tmp_path / "out").exists()


def test_configuration_keeps_ours_and_the_trainers_apart(tmp_path: Path) -> None:
    """In one flat file our keys are checked at once and the others go to the trainer, numbers as numbers."""
    file = tmp_path / "dpo.yaml"
    file.write_text("model: m\noutput: o\nlearning_rate: 1e-6\nmax_length: 64\nloss_type: [sigmoid, sft]\n")
    config = TrainDpoConfig.load(file, {"max_length": 128, "seed": None}, ["beta=0.5"])
    assert (config.max_length, config.ref) == (128, "model")
    assert config.trainer == {"learning_rate": 1e-6, "loss_type": ["sigmoid", "sft"], "beta": 0.5}
    with pytest.raises(UsageError, match="ref"):
        TrainDpoConfig.load(file, {"ref": "guess"})
