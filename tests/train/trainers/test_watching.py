"""What a training shows while it runs and at its end, and what it reports to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.commands.train.trainers.metrics import read_metrics
from gymdata.store import read_run_json
from tests.servers import Watcher
from tests.train.trainers.conftest import pair_rows, write_pairs
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch

SETTINGS = ["--set", "num_train_epochs=3", "--set", "learning_rate=1e-3", "--set", "per_device_train_batch_size=4"]


def test_a_training_shows_its_figures(policy: Path, pairs: Path, tmp_path: Path) -> None:
    """The last line of progress, the summary and run.json have loss, accuracy, margin, learning rate, gradient norm and
    speed, all of them those of metrics.jsonl."""
    done = gymdata("train-dpo", pairs, "-m", policy, "-o", tmp_path / "out", *SETTINGS)
    assert done.returncode == 0, done.stderr
    steps = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in row]
    last = steps[-1]
    line = [line for line in done.stderr.splitlines() if line.startswith("training 12/12")][-1]
    for part in (f"loss {last['loss']:.4g}", f"accuracy {last['rewards/accuracies']:.1%}", f"lr {last['learning_rate']:.3g}",
                 f"margin {last['rewards/margins']:.3g}", f"grad {last['grad_norm']:.3g}"):  # fmt: skip
        assert part in line
    training = read_run_json(tmp_path / "out")["training"]
    # A tenth of twelve steps is two.
    assert training["first"]["loss"] == pytest.approx((steps[0]["loss"] + steps[1]["loss"]) / 2)
    assert training["last"]["margin"] == pytest.approx(sum(row["rewards/margins"] for row in steps[-2:]) / 2)
    assert training["tokens_per_s"] == last["tokens_per_s"] > 0
    assert f"loss {training['first']['loss']:.4g} → {training['last']['loss']:.4g}" in " ".join(done.stdout.split())


def test_a_line_of_progress_has_the_figures_of_its_step(policy: Path, pairs: Path, tmp_path: Path) -> None:
    """A step that is logged is reported once, with its figures; another one without any."""
    from tests.train.trainers.conftest import start

    settings = {"logging_steps": 2, "logging_first_step": False}
    trainer, _ = start("dpo", pairs, policy, tmp_path / "out", settings, watch := Watcher())
    trainer.train()
    steps = [counts for counts in watch.counts if counts.get("done")]
    logged = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in row}
    assert [step["done"] for step in steps] == list(range(1, trainer.state.max_steps + 1))
    assert {step["done"]: step["loss"] for step in steps if "loss" in step} == logged
    assert set(logged) == {step for step in range(1, trainer.state.max_steps + 1) if step % 2 == 0}


def test_tokens_are_counted_without_padding(policy: Path, tmp_path: Path) -> None:
    """What the speed counts is the length of every sequence once an epoch, whatever the batches were filled up with."""
    from tests.train.trainers.conftest import start

    rows = pair_rows(policy)
    trainer, token_checksum = start(
        "dpo", write_pairs(tmp_path, rows), policy, tmp_path / "out", {"num_train_epochs": 2}
    )
    trainer.train()
    sides = zip(rows["prompt_ids"], rows["chosen_ids"], rows["rejected_ids"], strict=True)
    assert token_checksum.tokens_fed == 2 * sum(2 * len(p) + len(c) + len(r) for p, c, r in sides)


@pytest.mark.full
def test_tensorboard_has_the_run_under_its_name(policy: Path, pairs: Path, tmp_path: Path) -> None:
    """``report_to=tensorboard`` writes events of every step to OUT/logs, and the run is named after model, stage and data;
    the same command again does nothing."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    words = ["train-dpo", pairs, "-m", policy, "-o", out, *SETTINGS]
    words += ["--set", "report_to=tensorboard", "--set", "save_steps=5"]
    done = gymdata(*words)
    assert done.returncode == 0, done.stderr
    assert not (out / "checkpoints").exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = gymdata(*words)
    assert (again.returncode, "this training is finished, nothing to do" in again.stderr) == (0, True), again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    events = EventAccumulator(str(out / "logs"))
    events.Reload()
    losses = {row["step"]: row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row}
    assert {e.step: pytest.approx(e.value, abs=1e-6) for e in events.Scalars("train/loss")} == losses
    assert read_run_json(out)["settings"]["run_name"] == f"{policy.name}-train-dpo-{pairs.parent.name}"


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_service_that_is_not_installed_is_named(policy: Path, pairs: Path, tmp_path: Path, service: str) -> None:
    """Before torch is loaded: what is missing, the command that installs it, and nothing is left behind."""
    from importlib.util import find_spec

    if find_spec(service) is not None:
        pytest.skip(f"{service} is installed here")
    done = gymdata("train-dpo", pairs, "-m", policy, "-o", tmp_path / "out", "--set", f"report_to={service}")
    assert done.returncode == 2
    assert f"{service} is not installed" in done.stderr
    assert f"pip install {service}" in done.stderr
    assert not (tmp_path / "out").exists()
