"""The pair losses that TRL does not have, against their formulas in float64, and trained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.train.settings import OWN_PAIR_LOSSES, TrainDpoConfig
from gymdata.errors import UsageError
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch
BETA, SCALE = 0.3, 2.0


def kl(p: Any, q: Any) -> Any:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def by_hand(kind: str, scores: float, reward: float) -> float:
    """``scores``: β·(difference of log-ratios)."""
    ours, theirs = 1 / (1 + math.exp(-scores)), 1 / (1 + math.exp(-SCALE * reward))
    return {
        "rpo_sq": (scores - SCALE * reward) ** 2,
        "rpo_fwd_kl": kl(ours, theirs),
        "rpo_bwd_kl": kl(theirs, ours),
        "rebel": (scores - reward) ** 2,
    }[kind]


@pytest.mark.parametrize("kind", OWN_PAIR_LOSSES)
def test_value_and_gradient_are_those_of_the_formula(kind: str) -> None:
    """Each pair's loss by hand, and its gradient by differences of the formula. RPO has a scale of 1 where none is given,
    which REBEL has always."""
    import torch

    from gymdata.commands.train.trainers.dpo import pair_losses

    rng = np.random.default_rng(0)
    logps = torch.tensor(-rng.exponential(5.0, 10), requires_grad=True)
    reference, rewards = torch.tensor(-rng.exponential(5.0, 10)), torch.tensor(rng.normal(size=5))
    given = {"beta": BETA, "margin": torch.zeros(5), "rewards": rewards}
    found = pair_losses([(kind, 1.0)], logps, reference, torch.ones(10), **given, reward_scale=SCALE)
    (gradient,) = torch.autograd.grad(found.sum(), logps)
    ratios = (logps - reference).detach().numpy()
    for i in range(5):
        score, step = BETA * (ratios[i] - ratios[5 + i]), 1e-6
        assert float(found[i].detach()) == pytest.approx(by_hand(kind, score, float(rewards[i])), rel=1e-9)
        slope = by_hand(kind, score + step, float(rewards[i])) - by_hand(kind, score - step, float(rewards[i]))
        assert float(gradient[i]) == pytest.approx(BETA * slope / (2 * step), rel=1e-5, abs=1e-8)
        assert float(gradient[5 + i]) == -float(gradient[i])
    unscaled = (pair_losses([(each, 1.0)], logps, reference, torch.ones(10), **given) for each in ("rpo_sq", "rebel"))
    assert torch.equal(*unscaled)
    assert TrainDpoConfig.load(None, {"model": "m", "output": "o", "loss_type": "rpo_sq"}).reward_scale == 1


def test_smoothed_labels_are_cdpo() -> None:
    """−(1 − ε)·log σ(d) − ε·log σ(−d) with d = β·(difference of log-ratios), and its gradient; Mitchell 2023."""
    import torch

    from gymdata.commands.train.trainers.dpo import pair_losses

    rng, eps = np.random.default_rng(1), 0.2
    logps = torch.tensor(-rng.exponential(5.0, 10), requires_grad=True)
    reference = torch.tensor(-rng.exponential(5.0, 10))
    found = pair_losses([("sigmoid", 1.0)], logps, reference, torch.ones(10), beta=BETA, margin=torch.zeros(5),
                        label_smoothing=eps)  # fmt: skip
    (gradient,) = torch.autograd.grad(found.sum(), logps)
    ratios = (logps - reference).detach().numpy()
    for i in range(5):
        right = 1 / (1 + math.exp(-BETA * (ratios[i] - ratios[5 + i])))
        assert float(found[i].detach()) == pytest.approx(-(1 - eps) * math.log(right) - eps * math.log(1 - right))
        assert float(gradient[i]) == pytest.approx(BETA * (right - (1 - eps)))


def test_the_trainer_smooths_labels(assemble: Callable[..., tuple[Any, Any]], make_pairs: Any) -> None:
    """TRL's sigmoid leaves label_smoothing out: two steps away from the reference the loss is another than without."""
    losses = []
    for eps in (0.0, 0.3):
        given = {"label_smoothing": eps, "beta": BETA, "per_device_train_batch_size": 13}
        trainer, _ = assemble(make_pairs(), given, ref="saved")
        (batch,) = trainer.get_train_dataloader()
        losses.append(float(loss_of(trainer, batch)))
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("kind", OWN_PAIR_LOSSES)
def test_the_trainer_computes_them(assemble: Callable[..., tuple[Any, Any]], make_pairs: Any, kind: str) -> None:
    """TRL, which knows none of them, runs the model; at the first step every log-ratio is 0, so the loss is known."""
    margins = [0.5 + 0.25 * i for i in range(13)]
    given = {"loss_type": kind, "beta": BETA, "per_device_train_batch_size": 13}
    scale = {} if kind == "rebel" else {"reward_scale": SCALE}
    trainer, _ = assemble(make_pairs(margin=margins), given, **scale)
    (batch,) = trainer.get_train_dataloader()
    expected = np.mean([by_hand(kind, 0.0, margin) for margin in margins])
    assert float(loss_of(trainer, batch)) == pytest.approx(expected, rel=1e-5)
    assert trainer.loss_types == [kind]


def loss_of(trainer: Any, batch: Any) -> Any:
    return trainer.compute_loss(trainer.model, batch).detach()


def test_settings_that_do_nothing_are_refused() -> None:
    """reward_scale beside another loss, margin_scale beside these; a loss that cannot be combined is named."""
    with pytest.raises(UsageError, match=r"reward_scale: got 2\.0, which has no effect without loss_type rpo_sq"):
        TrainDpoConfig.load(None, {"model": "m", "output": "o", "reward_scale": 2.0, "loss_type": "rebel"})
    with pytest.raises(UsageError, match="margin_scale"):
        TrainDpoConfig.load(None, {"model": "m", "output": "o", "margin_scale": 2.0, "loss_type": ["rebel"]})


@pytest.mark.full
def test_a_training_with_rpo(policy: Path, make_pairs: Any, tmp_path: Path) -> None:
    """The command trains with them; one that TRL alone computes cannot stand beside."""
    file = make_pairs()
    words = ["train-dpo", file, "-m", policy, "-o", tmp_path / "out", "--json", "--set", "max_steps=2"]
    done = gymdata(*words, "--set", "loss_type=[rpo_bwd_kl, sft]")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trained_tokens"]["equal"] is True
    logged = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert "rewards/margins" in json.loads(logged[0])
    wrong = gymdata(*words, "--overwrite", "--set", "loss_type=[rebel, bco_pair]")
    assert (wrong.returncode, "loss_type rebel cannot be combined with loss_type bco_pair" in wrong.stderr) == (2, True)
