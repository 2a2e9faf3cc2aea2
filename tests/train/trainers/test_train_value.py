"""``train-value``: the loss against one written by hand in float64, and a critic that explains returns and that GAE uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.errors import RefusedError, UsageError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import experience_rows, rollout, training_data, write_experiences, write_run
from tests.train.trainers.conftest import start
from tests.train.trainers.running import assert_same, loss_and_gradients
from tests.train.trainers.running import gymdata as command

pytestmark = pytest.mark.torch


def value_rows(policy: Path) -> list[dict[str, Any]]:
    """Returns and old values that differ per token."""
    rng = np.random.default_rng(3)
    rows = experience_rows(policy, temperatures=(0.5, 1.0))
    for row in rows:
        row["returns"] = rng.normal(1.0, 1.0, len(row["input_ids"])).tolist()
        row["values"] = rng.normal(0.5, 0.5, len(row["input_ids"])).tolist()
    return rows


@pytest.fixture
def critic(policy: Path, tmp_path: Path) -> Path:
    """The policy as a sequence classifier whose head is not zero."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "critic"
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def by_hand(critic: Path, rows: list[dict[str, Any]], clip: float | None) -> tuple[float, dict[str, Any]]:
    """½·max((V − R)², (V_old ± ε − R)²), one token at a time in float64, the mean over all trained tokens."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(critic, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), sum(sum(row["loss_mask"]) for row in rows)
    for row in rows:
        values = model.score(model.model(torch.tensor([row["input_ids"]])).last_hidden_state)[0, :, 0]
        for t in range(1, len(row["input_ids"])):
            if not row["loss_mask"][t]:
                continue
            value, target, old = (
                values[t - 1],
                float(np.float32(row["returns"][t])),
                float(np.float32(row["values"][t])),
            )
            squares = [(value - target) ** 2]
            if clip is not None:
                squares.append((min(max(value, old - clip), old + clip) - target) ** 2)
            total = total + 0.5 * row["weight"] * max(squares) / count
    model.zero_grad()
    total.backward()
    return float(total.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("clip", [None, 0.2])
def test_loss_and_gradients_are_the_formula(critic: Path, tmp_path: Path, clip: float | None) -> None:
    """Masked mean of half the squared distance to the return, clipped about the old value where asked, in micro-batches."""
    rows = value_rows(critic)
    settings = {"per_device_train_batch_size": 3}
    trainer, _ = start(
        "value", write_experiences(tmp_path, rows), critic, tmp_path / "out", settings, split=0.0, value_clip=clip
    )
    loss, gradients = loss_and_gradients(trainer)
    expected = by_hand(critic, rows, clip)
    assert_same((loss, {name: gradients[name] for name in expected[1]}), expected, rel=2e-5)


def test_a_policy_begins_with_values_of_zero(policy: Path, tmp_path: Path) -> None:
    """The new head is zero, so the first loss is half the mean squared return and nothing is explained."""
    rows = value_rows(policy)
    trainer, _ = start("value", write_experiences(tmp_path, rows), policy, tmp_path / "out", {}, split=0.3)
    assert trainer.before["explained_variance"] == pytest.approx(0.0, abs=1e-12)
    held = trainer.data.heldout
    returns = held.lists("returns").values[held.lists("loss_mask").values != 0].astype(np.float64)
    assert trainer.before["mse"] == pytest.approx(np.square(returns).mean(), rel=1e-6)


def test_held_out_tasks_are_not_trained(policy: Path, tmp_path: Path) -> None:
    """The split is by task, and what is cut or left out takes its returns with it."""
    rows = value_rows(policy)
    rows[2]["loss_mask"] = [0] * len(rows[2]["loss_mask"])
    data = training_data("value", write_experiences(tmp_path, rows), split=0.3, seed=0, max_length=12)
    task = {row["rollout_id"]: row["task_id"] for row in rows}
    assert not {task[r] for r in data.rollout_ids} & set(data.heldout.tasks)
    known = {row["rollout_id"]: row for row in rows}
    for side in (data, data.heldout):
        for place, name in enumerate(side.rollout_ids):
            assert side.lists("returns")[place].tolist() == np.float32(known[name]["returns"][:12]).tolist()
            assert side.lists("values")[place].tolist() == np.float32(known[name]["values"][:12]).tolist()


def test_what_is_refused(policy: Path, tmp_path: Path) -> None:
    """Clipping without values, and a return that is not finite."""
    rows = experience_rows(policy)
    with pytest.raises(UsageError, match=r"--value-clip needs the values.*\n.*--critic"):
        start("value", write_experiences(tmp_path, rows), policy, tmp_path / "out", {}, value_clip=0.2)
    rows = value_rows(policy)
    rows[1]["returns"][-1] = float("inf")
    (tmp_path / "b").mkdir()
    with pytest.raises(RefusedError, match="returns of rollout-1/0 is inf on a trained token"):
        start("value", write_experiences(tmp_path / "b", rows), policy, tmp_path / "out", {}, split=0.0)


@pytest.fixture
def told_run(policy: Path, tmp_path: Path) -> Path:
    """Rollouts of 24 tasks whose reward is 1 after an answer of token 50, 0 after one of token 60."""
    from gymdata.models.model_identity import model_facts

    made = [
        rollout(f"t{task}", k, float(k % 2), [([5 + task, 7, 9], [60 - 10 * (k % 2), 61, 2 + k])], logprob=-1.125)
        for task in range(24)
        for k in range(4)
    ]  # fmt: skip
    run = write_run(tmp_path / "run", made)
    facts = model_facts(str(policy))
    identity = {"tokenizer_hash": facts.tokenizer_hash, "chat_template_hash": facts.chat_template_hash}
    write_run_json(run, {**read_run_json(run), "identity": identity})
    return run


@pytest.mark.full
@pytest.mark.matrix("True")
@pytest.mark.parametrize("lora", [False, True])
def test_the_critic_is_used_by_experience(policy: Path, told_run: Path, tmp_path: Path, lora: bool) -> None:
    """Training lowers the loss and explains the returns of held-out tasks; ``experience --critic`` on the folder with GAE
    then has small advantages where the outcome is known, and large ones on the token that decides it."""
    assert command("experience", told_run, "--estimator", "gae").returncode == 0
    out = tmp_path / "out"
    flags = ["--lora", "--set", "lora_target_modules=[q_proj, v_proj, down_proj]", "--set", "lora_r=8"] if lora else []
    done = command("train-value", told_run / "experiences-gae", "-m", policy, "-o", out, "--split", 0.25, *flags,
                   "--set", "num_train_epochs=12", "--set", "learning_rate=1e-2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = read_run_json(out)
    assert facts["trained_tokens"]["equal"] is True
    training, heldout = facts["training"], facts["heldout"]
    assert training["last"]["loss"] < 0.6 * training["first"]["loss"]
    assert (heldout["tasks"], heldout["tokens"]) == (6, 6 * 4 * 3)
    # The first of three tokens is predicted before the outcome is known, so a third of the variance is out of reach.
    assert heldout["before"]["explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert 0.5 < heldout["explained_variance"] < 0.75
    last, _, _next = (line.split() for line in done.stdout.strip().splitlines()[-3:])
    assert last == ["held-out", "explained", "variance", "0", "→", f"{heldout['explained_variance']:.3g}"]
    assert "before training, on held-out tasks: explained variance 0" in done.stderr
    assert f"explained variance {training['last']['explained_variance']:.3g}"[:20] in " ".join(done.stdout.split())

    made = gymdata.experience(told_run, tmp_path / "credited", critic=str(out), estimator="gae", lam=0.9)
    assert made.notes == []
    rows = read_table(made.path, EXPERIENCES).to_pylist()
    deciding, later = (np.array([np.abs(row["advantages"][3 + i]) for row in rows]) for i in (0, 1))
    assert deciding.mean() > 3 * later.mean()
    assert read_run_json(tmp_path / "credited")["critic"]["path"] == str(out)


@pytest.mark.full
def test_returns_of_compared_rollouts_are_a_warning(policy: Path, told_run: Path, tmp_path: Path) -> None:
    """GRPO's returns have the group's mean taken off, which a critic cannot predict."""
    assert command("experience", told_run).returncode == 0
    done = command(
        "train-value", told_run / "experiences-grpo", "-m", policy, "-o", tmp_path / "out", "--dry-run", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "were made with --estimator grpo, which compares the rollouts" in done.stderr
    assert json.loads(done.stdout)["counts"]["heldout_tasks"] == 2
