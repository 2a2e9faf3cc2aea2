"""Batch RL: loss and gradient against a reference written by hand in float64, and what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gymdata.commands.train.pair_data import sequences_of
from gymdata.commands.train.sequence_data import training_experiences
from gymdata.errors import RefusedError
from gymdata.rollouts.schema import EXPERIENCES
from tests.rollout_files import N, experience_rows, reference_logps, write_experiences
from tests.train.trainers.conftest import start
from tests.train.trainers.running import assert_same, loss_and_gradients

pytestmark = pytest.mark.torch

Assemble = Callable[..., tuple[Any, Any]]


@pytest.fixture
def assemble_rl(policy: Path, tmp_path: Path) -> Assemble:
    """The trainer of a job in this process, and the file's rows as they were written."""

    def build(rows: list[dict[str, Any]], kl_beta: float = 0.0, settings: dict[str, Any] | None = None) -> Any:
        given, job = {"learning_rate": 0.1, **(settings or {})}, {"kl_beta": kl_beta, "clip_low": 0.2, "clip_high": 0.3}
        return start("rl", write_experiences(tmp_path, rows), policy, tmp_path / "out", given, **job)

    return build


def by_hand(policy: Path, rows: list[dict[str, Any]], kl_beta: float) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of PPO, one token at a time in float64."""
    import torch

    total, count = torch.zeros((), dtype=torch.float64), sum(sum(row["loss_mask"]) for row in rows)
    for row in rows:
        model, logps = reference_logps(policy, row)
        for t in range(1, len(row["input_ids"])):
            if not row["loss_mask"][t]:
                continue
            lp, advantage = logps[t - 1], float(np.float32(row["advantages"][t]))
            ratio = torch.exp(lp - float(np.float32(row["logprobs"][t])))
            token = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
            if kl_beta:
                apart = lp - float(np.float32(row["ref_logprobs"][t]))
                token = token + kl_beta * (torch.exp(-apart) - 1 + apart)
            total = total + row["weight"] * token / count
    model.zero_grad()
    total.backward()
    return float(total.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kl_beta", "temperatures", "logits"),
    [(0.0, (0.5,), 2**28), (0.2, (0.5,), 2**28), (0.0, (1.0,), 2**28), (0.0, (0.5, 1.0), 2**28), (0.2, (0.5,), 0),
     (0.0, (1.0,), 0)],
)  # fmt: skip
def test_loss_and_gradient_are_those_by_hand(
    policy: Path, assemble_rl: Assemble, kl_beta: float, temperatures: tuple[float, ...], logits: int
) -> None:
    """Off-policy, at one temperature (also in parts, fused) and at two (row by row), with weights and a KL to saved
    references."""
    rows = experience_rows(policy, temperatures)
    for row in rows:  # whatever stands beside context and tool tokens, they get no gradient
        row["advantages"] = [a if m else 99.0 for a, m in zip(row["advantages"], row["loss_mask"], strict=True)]
        row["logprobs"] = [a if m else -50.0 for a, m in zip(row["logprobs"], row["loss_mask"], strict=True)]
    trainer, _ = assemble_rl(rows, kl_beta)
    trainer.max_logits = logits
    assert_same(loss_and_gradients(trainer), by_hand(policy, rows, kl_beta), 2e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_the_split_into_batches_does_not_matter(policy: Path, assemble_rl: Assemble, size: int) -> None:
    """A mean over all trained tokens of the step: micro-batches of any size, and so any padding, give one gradient."""
    rows = experience_rows(policy)
    whole = loss_and_gradients(assemble_rl(rows, settings={"per_device_train_batch_size": N})[0])
    assert_same(loss_and_gradients(assemble_rl(rows, settings={"per_device_train_batch_size": size})[0]), whole, 1e-5)
    padded = {"per_device_train_batch_size": size, "pad_to_multiple_of": 64}
    assert_same(loss_and_gradients(assemble_rl(rows, settings=padded)[0]), whole, 1e-5)


def test_a_model_that_gives_all_logits_trains_the_same(policy: Path, assemble_rl: Assemble) -> None:
    """Where a model cannot be asked for some positions only, those are taken from all."""
    rows = experience_rows(policy)
    (some, _), (every, _) = assemble_rl(rows), assemble_rl(rows)
    assert some.keeps
    every.keeps = False
    assert_same(loss_and_gradients(every), loss_and_gradients(some), 1e-5)


def test_at_step_0_the_ratio_is_1(policy: Path, assemble_rl: Assemble) -> None:
    """With the model's own log-probs: max |ratio − 1| ≤ 1e-4, |mean − 1| ≤ 1e-6, a full effective sample; off-policy not."""
    trainer, _ = assemble_rl(experience_rows(policy, noise=0.0))
    facts = trainer.compare(refuse=True)
    assert max(facts["max"] - 1, 1 - facts["min"]) <= 1e-4
    assert abs(facts["mean"] - 1) <= 1e-6
    assert facts["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert facts["share_outside"] == 0
    trainer, _ = assemble_rl(experience_rows(policy))
    assert trainer.compare(refuse=False)["share_outside"] > 0.3
    trainer.on_policy = True
    with pytest.raises(RefusedError, match="L305"):
        trainer.compare(refuse=True)


def test_the_reference_is_the_model_before_training(policy: Path, assemble_rl: Assemble) -> None:
    """Without saved references the KL is to the model as it was loaded: it changes nothing at the first step."""
    rows = [{k: v for k, v in row.items() if k != "ref_logprobs"} for row in experience_rows(policy)]
    with_kl, _ = assemble_rl(rows, kl_beta=0.5)
    without, _ = assemble_rl(rows)
    assert_same(loss_and_gradients(with_kl), loss_and_gradients(without), 1e-5)


def test_cutting_is_counted_and_contradictions_are_refused(policy: Path) -> None:
    """A limit shorter than a prompt leaves the sequence out and names it; doubled rows and short lists are errors."""
    rows = experience_rows(policy)
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in rows[0]])

    def table(made: list[dict[str, Any]]) -> pa.Table:
        return pa.Table.from_pylist(made, schema=schema)

    whole, cut = training_experiences(table(rows)), training_experiences(table(rows), max_length=5)
    assert sequences_of(whole).n_trained.sum() == sum(sum(r["loss_mask"]) for r in rows)
    lost = {f"{r['rollout_id']}/0" for r in rows if not any(r["loss_mask"][:5])}
    assert set(cut.facts.cost.nothing_trained) == lost
    assert cut.facts.cost.trained_tokens_lost == sum(sum(r["loss_mask"][5:]) for r in rows)
    assert len(cut) == N - len(lost)
    for row, rollout in zip(range(len(cut)), cut.rollout_ids, strict=True):
        original = next(r for r in rows if r["rollout_id"] == rollout)
        assert cut.lists("input_ids")[row].tolist() == original["input_ids"][:5]
    with pytest.raises(RefusedError, match="L301"):
        training_experiences(table([{**rows[0], "logprobs": rows[0]["logprobs"][:-1]}]))
    bad = [math.inf if m else 0.0 for m in rows[0]["loss_mask"]]
    with pytest.raises(RefusedError, match="L302"):
        training_experiences(table([{**rows[0], "logprobs": bad}]))
