"""Trainings that run the common beginnings of a batch once are the trainings that they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import SFTConfig

from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.train.trainers.batches import EpochSampler, pays_on_cuda, shared_tokens, siblings_alternating
from tests.rollout_files import experience_rows, experiences, rollout, two_turns, write_experiences, write_run
from tests.train.trainers.conftest import file_for, pair_rows, start, write_pairs
from tests.train.trainers.running import Crash, curve

pytestmark = pytest.mark.torch

EVERY = sorted(TRAINERS)
PROMPT = [20 + i for i in range(30)]


def sibling_file(algorithm: str, policy: Path, folder: Path) -> Path:
    """Two prompts that the sequences of a file begin with."""
    table = TRAINERS[algorithm].table.name
    prompts = [PROMPT, PROMPT[::-1]]
    if table == "pairs":
        rows = pair_rows(policy, 8)
        return write_pairs(folder, rows | {"prompt_ids": [prompts[i % 2] for i in range(8)]})
    if table == "rollouts":
        rewards = (0.0, 1.0, 0.5, 0.25)
        rows = [rollout(f"t{t}", i, r, two_turns(5 + t, 40 + i)) for t in range(4) for i, r in enumerate(rewards)]
        return write_run(folder / "run", rows)
    made = experience_rows(policy)
    for i, row in enumerate(made):
        head, first = prompts[i % 2], row["turn_starts"][0]
        row["input_ids"] = head + row["input_ids"][first:]
        row["turn_starts"] = [len(head)]
        row["loss_mask"] = [0] * len(head) + row["loss_mask"][first:]
        for name in ("logprobs", "advantages", "returns", "ref_logprobs"):
            row[name] = [0.0] * len(head) + row[name][first:]
    return write_experiences(folder, made)


def train(algorithm: str, policy: Path, folder: Path, sharing: str, **job: Any) -> tuple[Any, list[float]]:
    """A trainer that has trained, and its losses."""
    given = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_train_epochs": 2, **job.pop("settings", {})}
    if algorithm == "sft":
        job.setdefault("select", "all")
    file = sibling_file(algorithm, policy, folder)
    trainer, token_checksum = start(algorithm, file, policy, folder / sharing, given, prefix_sharing=sharing, **job)
    token_checksum.dry_run_batches(trainer)
    trainer.train()
    assert token_checksum.as_json()["equal"] is True
    return trainer, list(curve(folder / sharing).values())


@pytest.mark.matrix("rl")
@pytest.mark.matrix("dpo", "rl")
@pytest.mark.parametrize("algorithm", EVERY)
def test_sharing_changes_no_training(algorithm: str, policy: Path, tmp_path: Path) -> None:
    """The same batches with and without: losses and weights within rounding, the proof of trained tokens equal, and
    tokens were saved."""
    options = {"settings": {"train_sampling_strategy": "sequential"}}
    if algorithm == "kto":
        # Its order is drawn before, and depends on whether siblings are to meet.
        options = {"settings": {"per_device_train_batch_size": 16, "loss_type": "apo_zero_unpaired"}}
    shared, losses = train(algorithm, policy, tmp_path, "on", **options)
    plain, expected = train(algorithm, policy, tmp_path, "off", **options)
    assert plain.shared is None
    assert shared.shared.saved > 0.15
    assert losses == pytest.approx(expected, rel=2e-5, abs=1e-6)
    for (name, one), other in zip(shared.model.named_parameters(), plain.model.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) < 2e-4, name


@pytest.mark.matrix("rl")
@pytest.mark.parametrize("algorithm", ["rl", "dpo"])
def test_accumulated_batches_are_those_of_one(algorithm: str, policy: Path, tmp_path: Path) -> None:
    """Batches of four, and of two accumulated twice: the same losses, siblings together in both."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    _, four = train(algorithm, policy, tmp_path / "a", "on")
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    _, two = train(algorithm, policy, tmp_path / "b", "on", settings=halves)
    assert two == pytest.approx(four, rel=2e-4, abs=1e-5)


@pytest.mark.full
def test_resuming_keeps_the_order_of_siblings(policy: Path, tmp_path: Path) -> None:
    """After a crash in the second epoch the losses are those of the training that was not stopped, bit for bit."""
    given = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    file = sibling_file("rl", policy, tmp_path)

    def begin(out: str) -> Any:
        return start("rl", file, policy, tmp_path / out, given, prefix_sharing="on")[0]

    begin("whole").train()
    broken = begin("broken")
    broken.add_callback(Crash(7))
    with pytest.raises(RuntimeError, match="crash"):
        broken.train()
    resumed, token_checksum = start("rl", file, policy, tmp_path / "broken", given, prefix_sharing="on")
    token_checksum.restore(tmp_path / "broken/checkpoints/checkpoint-6")
    resumed.train(resume_from_checkpoint=str(tmp_path / "broken/checkpoints/checkpoint-6"))
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


@pytest.mark.parametrize("algorithm", EVERY)
def test_left_to_itself_a_trainer_shares_and_siblings_meet(algorithm: str, policy: Path, tmp_path: Path) -> None:
    """On a CPU with the order that the trainer has by itself, which KTO draws beforehand: prefixes are shared, and rows with
    one prompt are grouped where that saves a quarter, not where rows share nothing."""
    options = {"select": "all"} if algorithm == "sft" else {}
    trainer, _ = start(algorithm, sibling_file(algorithm, policy, tmp_path), policy, tmp_path / "out", {}, **options)
    assert trainer.shared is not None
    if algorithm not in ("rl", "dpo", "reward"):
        return
    groups = trainer.groups[np.concatenate([batch["rows"] for batch in trainer.get_train_dataloader()])]
    assert np.count_nonzero(np.diff(groups)) == 1
    (tmp_path / "other").mkdir()
    file = file_for(algorithm, policy, tmp_path / "other")
    alone, _ = start(algorithm, file, policy, tmp_path / "alone", {})
    assert alone.groups is None


@pytest.mark.parametrize("settings", [{"train_sampling_strategy": "group_by_length"}, {"use_cpu": False}])
def test_left_to_itself_sharing_is_for_cpus_and_random_order(
    settings: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    """With an order that was asked for, and on another device than a CPU, nothing is shared or grouped unless it is on."""
    file = sibling_file("rl", policy, tmp_path)
    trainer, _ = start("rl", file, policy, tmp_path / "auto", settings)
    assert (trainer.shared, trainer.groups) == (None, None)
    trainer, _ = start("rl", file, policy, tmp_path / "on", settings, prefix_sharing="on")
    assert trainer.shared is not None


def test_a_sampler_draws_each_epoch_anew_and_fillers_come_last() -> None:
    """Rows of a group are neighbors; the same epoch gives the same order, another one another."""
    groups = np.repeat(np.arange(20), 5)
    sampler = EpochSampler(100, 104, 3, groups)
    first = list(sampler)
    assert first == list(sampler)
    assert sorted(first) == list(range(104))
    assert first[100:] == [100, 101, 102, 103]
    assert np.count_nonzero(np.diff(groups[first[:100]])) == 19
    sampler.set_epoch(1)
    assert list(sampler) != first


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=40), st.integers(0, 5))
def test_alternating_groups_are_an_order_of_all_rows(groups: list[int], seed: int) -> None:
    """Every row once, whatever the sizes of the groups."""
    codes = np.unique(groups, return_inverse=True)[1]
    order = siblings_alternating(codes, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(codes)))


def test_neighbors_of_alternating_groups_have_other_prompts() -> None:
    """Eight groups of four: no row follows one of its own group, and each meets a sibling within two rows."""
    groups = np.repeat(np.arange(8), 4)
    order = groups[siblings_alternating(groups, np.random.default_rng(0))]
    assert (np.diff(order) != 0).all()
    assert (order[2:] == order[:-2]).mean() > 0.7


def test_shared_tokens_are_those_that_another_sequence_of_the_batch_has(policy: Path, tmp_path: Path) -> None:
    """Two of three sequences share two of their three tokens; alone in their batches they share none."""
    rows = experience_rows(policy)[:3]
    for row, ids in zip(rows, ([1, 2, 3], [1, 2, 4], [5, 6, 7]), strict=True):
        row.update(input_ids=ids, loss_mask=[0, 0, 1], turn_starts=[2])
        row.update({name: [0.0, 0.0, -1.0] for name in ("logprobs", "advantages", "returns", "ref_logprobs")})
    trainer, _ = start("rl", write_experiences(tmp_path, rows), policy, tmp_path / "out", {})
    assert shared_tokens(trainer.data, np.arange(3), 3) == pytest.approx((2 / 9, 2 / 3))
    assert shared_tokens(trainer.data, np.arange(3), 1) == (0, 0)


@pytest.mark.parametrize(("prompt", "size", "pays"), [(2_000, 4, True), (2_000, 1, False), (1_000, 4, False)])
def test_sharing_on_cuda_is_for_long_prompts(prompt: int, size: int, pays: bool, tmp_path: Path) -> None:
    """Of four answers to a prompt of 2,000 tokens 1,500 of each sequence are shared, of which none are in batches of one."""
    mask, numbers = [*[0] * prompt, 1], [0.0] * (prompt + 1)
    same = {"loss_mask": mask, "logprobs": numbers, "advantages": numbers, "turn_starts": [prompt]}
    rows: list[dict[str, Any]] = [{"input_ids": [*[5] * prompt, 7 + row], **same} for row in range(4)]
    (data,) = TRAINERS["rl"].load(None, {"model": "m", "output": "o"}).parts(experiences(tmp_path, rows))
    assert pays_on_cuda(data, SFTConfig(per_device_train_batch_size=size, use_cpu=True)) is pays
