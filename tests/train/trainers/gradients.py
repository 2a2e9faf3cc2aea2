"""Losses and gradients of a trainer, and how they are compared."""

from __future__ import annotations

from typing import Any

import pytest


def loss_and_gradients(trainer: Any) -> tuple[float, dict[str, Any]]:
    """Of one step over the whole file, in the trainer's own micro-batches."""
    batches = list(trainer.get_train_dataloader())
    count = trainer._get_num_items_in_batch(batches, trainer.args.device)
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=count)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def assert_same(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]], rel: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel, abs=rel)
    scale = max(float(g.abs().max()) for g in expected[1].values())
    for name, gradient in expected[1].items():
        assert float((found[1][name].double() - gradient.double()).abs().max()) <= rel * scale, name
