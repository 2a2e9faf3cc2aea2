"""``train-kto``: which rollouts are desirable, and that the loss is KTO's on exactly their sampled tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.errors import RefusedError
from gymdata.scores.chosen import labels
from tests.rollout_files import BREAK, rollout, rollouts_table, scored_run, training_data, two_turns, write_run
from tests.train.trainers.conftest import start
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch


def rows() -> list[dict[str, Any]]:
    return [
        rollout("a", 0, 0.5, two_turns(5, 40)), rollout("a", 1, 1.0, BREAK), rollout("a", 2, 0.0, two_turns(5, 41)),
        rollout("b", 0, None, two_turns(6, 42)), rollout("b", 1, 0.25, two_turns(6, 43)),
        rollout("c", 0, 0.1, two_turns(7, 43)), rollout("c", 1, 0.1, two_turns(7, 44)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("threshold", "good", "bad"),
    [
        (None, ["a-1"], ["a-2"]),
        (0.25, ["a-0", "a-1"], ["a-2", "c-0", "c-1"]),
        (0.5, ["a-1"], ["a-2", "b-1", "c-0", "c-1"]),
        (2.0, [], ["a-0", "a-1", "a-2", "b-1", "c-0", "c-1"]),
    ],
)
def test_labels(threshold: float | None, good: list[str], bad: list[str]) -> None:
    """Above the bar desirable, below it not; on it, or without a reward, no label; the order of rows does not matter."""
    for order in (np.arange(7), np.array([6, 3, 1, 5, 0, 4, 2])):
        table = rollouts_table([rows()[i] for i in order])
        found, desirable = labels(table, threshold)
        ids = table["rollout_id"].to_pylist()
        assert sorted(ids[r] for r, up in zip(found, desirable, strict=True) if up) == good
        assert sorted(ids[r] for r, up in zip(found, desirable, strict=True) if not up) == bad


def test_what_is_left_out_is_counted() -> None:
    """Ties and missing rewards are told apart; a broken rollout's sequences all have its label."""
    data = training_data("kto", rollouts_table(rows()))
    assert data.counts == {
        "rollouts": 7, "desirable": 1, "undesirable": 1, "left_out_tie": 4, "left_out_no_reward": 1,
        "left_out_duplicate": 0, "sequences": 3,
    }  # fmt: skip
    assert dict(zip(data.rollout_ids, data.numbers("label").tolist(), strict=True)) == {"a-1": True, "a-2": False}


def test_labels_of_very_large_rewards() -> None:
    """The mean of a task's rewards is found where their sum is beyond float64."""
    table = rollouts_table([rollout("a", i, r, two_turns(5, 40 + i)) for i, r in enumerate([1e308, 1e308, -1e308])])
    assert [part.tolist() for part in labels(table, None)] == [[0, 1, 2], [True, True, False]]


def test_copies_are_trained_once() -> None:
    """Of rollouts with the same ids and label one is trained; the same ids with the other label are not a copy."""
    table = rollouts_table([rollout("a", i, r, two_turns(5, a)) for i, (r, a) in enumerate(
        [(1.0, 40), (1.0, 40), (0.0, 41), (0.0, 40), (0.0, 41)]
    )])  # fmt: skip
    data = training_data("kto", table)
    assert list(zip(data.rollout_ids, data.numbers("label").tolist(), strict=True)) == [
        ("a-0", True), ("a-2", False), ("a-3", False)
    ]  # fmt: skip
    assert (data.counts["desirable"], data.counts["undesirable"], data.counts["left_out_duplicate"]) == (2, 3, 2)
    every = training_data("kto", table, keep_duplicates=True)
    assert (len(every), every.counts["left_out_duplicate"]) == (5, 0)
    assert every.n_trained.sum() == 5 * 5
    assert data.n_trained.sum() == 3 * 5


def test_nothing_to_tell_apart_is_refused() -> None:
    """No reward at all is R501, rewards that are all alike R503."""
    with pytest.raises(RefusedError, match="R501"):
        training_data("kto", rollouts_table([rows()[3]]))
    with pytest.raises(RefusedError, match="R503"):
        training_data("kto", rollouts_table(rows()[5:]))


def test_the_loss_is_that_by_hand(policy: Path, tmp_path: Path) -> None:
    """Against float64 one rollout at a time: log-ratios of sampled tokens only, the KL from crossed completions, weights."""
    import torch
    from transformers import AutoModelForCausalLM

    file = scored_run(tmp_path / "run", tasks=3)
    trainer, _ = start("kto", file, policy, tmp_path / "out", {"beta": 0.3}, desirable_weight=1.5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    now = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    now.load_state_dict({name: value.double() for name, value in trainer.model.state_dict().items()})
    before = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)

    def log_ratio(ids: np.ndarray, mask: np.ndarray) -> float:
        tensor = torch.tensor(ids[None].astype(np.int64))
        scores = []
        for model in (now, before):
            logps = torch.log_softmax(model(input_ids=tensor).logits[0, :-1], dim=-1).detach()
            scores.append(sum(float(logps[t - 1, tensor[0, t]]) for t in np.flatnonzero(mask)))
        return scores[0] - scores[1]

    data = trainer.data
    all_ids, masks = data.lists("input_ids"), data.lists("loss_mask")
    first = [int(np.argmax(mask)) for mask in data.table["loss_mask"].to_pylist()]
    for batch in trainer.get_train_dataloader():
        lines = batch["rows"].tolist()
        own = [log_ratio(all_ids[i], masks[i]) for i in lines]
        crossed = []
        for x, y in zip(lines, [lines[-1], *lines[:-1]], strict=True):
            ids = [*all_ids[x][: first[x]], *all_ids[y][first[y] :]]
            mask = [*[0] * first[x], *masks[y][first[y] :]]
            crossed.append(log_ratio(np.array(ids), np.array(mask)))
        kl = max(0.0, float(np.mean(crossed)))
        losses = [
            1.5 * (1 - 1 / (1 + math.exp(-0.3 * (r - kl))))
            if data.numbers("label")[i]
            else 1 - 1 / (1 + math.exp(-0.3 * (kl - r)))
            for i, r in zip(lines, own, strict=True)
        ]
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_tool_tokens_get_no_gradient(policy: Path, tmp_path: Path) -> None:
    """The gradient at the logits is 0 wherever the next token is prompt, tool output or padding."""
    import torch

    run = scored_run(tmp_path / "run")
    trainer, _ = start("kto", run, policy, tmp_path / "out", {}, prefix_sharing="off")
    batch = next(iter(trainer.get_train_dataloader()))
    kept: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].retain_grad()
            kept.append(output[0])

    handle = trainer.model.model.register_forward_hook(keep)
    trainer.compute_loss(trainer.model, batch).backward()
    handle.remove()
    (last,) = kept
    touched = last.grad.abs().sum(dim=-1)[:, :-1] > 0
    assert torch.equal(touched, batch["completion_mask"][:, 1:] == 1)


@pytest.mark.full
def test_the_command_separates_good_from_bad(policy: Path, tmp_path: Path) -> None:
    """The proof holds, counts are told, and the margin between good and bad rollouts grows from 0."""
    run = write_run(tmp_path / "run", [r for t in range(4) for r in (
        rollout(f"t{t}", 0, 1.0, two_turns(5 + t, 50)), rollout(f"t{t}", 1, 0.0, two_turns(5 + t, 60)))])  # fmt: skip
    done = gymdata("train-kto", run, "-m", policy, "-o", tmp_path / "out", "--json", "--undesirable-weight", 0.8,
                   "--set", "num_train_epochs=10", "--set", "learning_rate=3e-3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["trained_tokens"]["equal"] is True
    assert (result["counts"]["desirable"], result["counts"]["undesirable"]) == (4, 4)
    assert result["settings"]["undesirable_weight"] == 0.8
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    margins = [row["rewards/margins"] for row in logged if "rewards/margins" in row]
    assert margins[0] == pytest.approx(0.0, abs=1e-4)
    assert margins[-1] > 0.05
