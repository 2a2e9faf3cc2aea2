"""The losses of batch RL in a training: batches, components and masks, settings, losses of one's own, two processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.train.settings import TrainRlConfig
from gymdata.errors import UsageError
from tests.formulas import ALONE, clip
from tests.rollout_files import N, experience_rows, reference_logps, write_experiences
from tests.train.trainers.conftest import start
from tests.train.trainers.running import assert_same, loss_and_gradients

pytestmark = pytest.mark.torch

Assemble = Callable[..., Any]


@pytest.fixture
def assemble_rl(policy: Path, tmp_path: Path) -> Assemble:
    def build(rows: list[dict[str, Any]], given: dict[str, Any] | None = None, **job: Any) -> Any:
        given = {"learning_rate": 0.1, **(given or {})}
        return start("rl", write_experiences(tmp_path, rows), policy, tmp_path / "out", given, **job)[0]

    return build


def weighted_rows(policy: Path) -> list[dict[str, Any]]:
    """Rows with an optimal value, and a token whose weights differ in each component."""
    rows = experience_rows(policy)
    for i, row in enumerate(rows):
        row["optimal_value"] = 0.3 + 0.1 * i
        n = len(row["input_ids"])
        kinds = [(j + i) % 3 for j in range(n)]
        masked = row["loss_mask"]
        row["rl_weight"] = [float(m * (k != 1)) for m, k in zip(masked, kinds, strict=True)]
        row["ce_weight"] = [0.5 * m * (k == 1) for m, k in zip(masked, kinds, strict=True)]
        row["ref_kl_weight"] = [0.25 * m * (k == 2) for m, k in zip(masked, kinds, strict=True)]
    return rows


@pytest.mark.matrix("ppo_clip-True", "gspo-False")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_eight_are_four_and_four(policy: Path, assemble_rl: Assemble, name: str, weighted: bool) -> None:
    """Loss and gradient of a step do not depend on how its sequences are split into batches, with and without weights."""
    rows = weighted_rows(policy)
    if not weighted:
        rows = [{k: v for k, v in row.items() if not k.endswith("_weight")} for row in rows]
    whole, split = (
        loss_and_gradients(assemble_rl(rows, {"per_device_train_batch_size": size}, loss=name, sequence_mask=0.1))
        for size in (N, 2)
    )
    assert_same(split, whole, 1e-5)


def test_components_are_means_over_their_own_tokens(policy: Path, assemble_rl: Assemble) -> None:
    """Σ over rl, ce and ref_kl of Σ w·ℓ / Σ [w ≠ 0], each over the whole file, by hand from float64 log-probs."""
    rows = weighted_rows(policy)
    sums, counts = {}, {}
    for row in rows:
        _, found = reference_logps(policy, row)
        logps = [0.0, *(float(x) for x in found.detach())]
        for t in range(1, len(logps)):
            ratio = math.exp(logps[t] - row["logprobs"][t])
            d = logps[t] - row["ref_logprobs"][t]
            parts = {
                "rl": -min(ratio * row["advantages"][t], clip(ratio, 0.8, 1.2) * row["advantages"][t]),
                "ce": -logps[t],
                "ref_kl": math.exp(-d) - 1 + d,
            }
            for part, value in parts.items():
                weight = row[f"{part}_weight"][t]
                sums[part] = sums.get(part, 0.0) + row["weight"] * weight * value
                counts[part] = counts.get(part, 0) + (weight != 0)
    assert min(counts.values()) > 5
    expected = sum(sums[part] / counts[part] for part in sums)
    assert loss_and_gradients(assemble_rl(rows))[0] == pytest.approx(expected, rel=1e-5)


def test_tool_output_trains_where_its_mask_is_1(policy: Path, assemble_rl: Assemble) -> None:
    """Tool tokens with mask 1, ce_weight 1 and rl_weight 0: the loss is their cross-entropy, the ratio is of sampled tokens
    alone; a weight at a masked token is refused and says what to do."""
    import torch

    rows = experience_rows(policy, noise=0.0)
    for row in rows:
        row["rl_weight"] = [float(m) for m in row["loss_mask"]]
        first = row["loss_mask"].index(1)
        row["ce_weight"] = [float(not m and t > first) for t, m in enumerate(row["loss_mask"])]
    with pytest.raises(Exception, match=r"ce_weight of token \d+ of rollout-0/0 is 1, but its loss_mask is 0"):
        assemble_rl(rows)
    for row in rows:
        row["loss_mask"] = [int(m or c) for m, c in zip(row["loss_mask"], row["ce_weight"], strict=True)]
        row["advantages"] = [0.0] * len(row["loss_mask"])
    trainer = assemble_rl(rows, {"per_device_train_batch_size": N})
    assert trainer.compare(refuse=True)["mean"] == pytest.approx(1.0, abs=1e-6)
    (batch,) = trainer.get_train_dataloader()
    logps = trainer.outputs(trainer.model, batch)
    tool = batch["ce_weight"] != 0
    expected = -(logps * tool * batch["weight"][:, None]).sum() / tool.sum()
    loss = trainer.compute_loss(trainer.model, batch)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert int(tool.sum()) == 3 * N
    assert torch.isfinite(loss)


def test_oapl_needs_its_column(policy: Path, assemble_rl: Assemble) -> None:
    """Without optimal_value the error names the flag that writes it; with it the advantage is reward − optimal_value."""
    rows = weighted_rows(policy)
    bare = [{k: v for k, v in row.items() if k != "optimal_value"} for row in rows]
    with pytest.raises(UsageError, match="optimal_value") as told:
        assemble_rl(bare, loss="oapl")
    assert "--optimal-value-beta" in str(told.value.hint)
    trainer = assemble_rl(rows, loss="oapl")
    assert trainer.data.lists("advantages")[2].tolist() == pytest.approx([1.0 - 0.5] * len(rows[2]["input_ids"]))


def config(**settings: Any) -> TrainRlConfig:
    return TrainRlConfig.load(None, {"model": "m", "output": "o", **settings})


def test_settings_belong_to_their_loss() -> None:
    """Defaults are the loss's own; a setting that the loss does not have is refused and names those that have it."""
    assert config(loss="gspo").loss_settings == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert config(loss="icepop", clip_high=1.0).loss_settings == {"clip_low": 0.5, "clip_high": 1.0}
    with pytest.raises(
        UsageError, match=r"tis_cap: got 3\.0, which has no effect without loss=dppo_kl, dppo_tv, mis, tis_r"
    ):
        config(loss="gspo", tis_cap=3.0)
    with pytest.raises(UsageError, match="clip_low"):
        config(loss="a.py:f", clip_low=0.1)
    with pytest.raises(
        UsageError, match=r"loss_constant: got 5\.0, which has no effect without loss_aggregation=.const"
    ):
        config(loss_constant=5.0)
    with pytest.raises(UsageError, match="got 'gsop', expected one of 21, such as gpg, gspo") as told:
        config(loss="gsop")
    assert told.value.hint == "did you mean 'gspo'?; --help lists all"


@pytest.mark.parametrize(
    ("ours", "verls"),
    [
        ("token", "token-mean"),
        ("sequence-sum", "seq-mean-token-sum"),
        ("sequence-mean", "seq-mean-token-mean"),
        ("constant", "seq-mean-token-sum-norm"),
    ],
)
def test_the_names_that_verl_has_for_means_are_accepted(ours: str, verls: str) -> None:
    """Each of them, as well as ours, and the page of batch RL has both in one row."""
    assert [config(loss_aggregation=name).loss_aggregation for name in (ours, verls)] == [ours, ours]
    page = Path(__file__).parents[3] / "gymdata" / "docs" / "batch-rl.md"
    assert re.search(rf"^\| `{ours}` \|[^|]*\| `{verls}`", page.read_text(), re.MULTILINE)


MINE = """
import torch

def plain(logprobs, saved, advantages, mask, reference=None):
    assert reference is not None
    ratio = torch.exp(logprobs - saved)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

def mean(logprobs, saved, advantages, mask, reference=None):
    return logprobs.mean()

def infinite(logprobs, saved, advantages, mask, reference=None):
    return logprobs / 0

def broken(logprobs, saved, advantages, mask, reference=None):
    return {}["no"]

def whole(logprobs, saved, advantages, mask, reference=None):
    return -advantages * logprobs, advantages > 0

whole.aggregation = "sequence-sum"
"""


def test_a_loss_of_ones_own(policy: Path, assemble_rl: Assemble, tmp_path: Path) -> None:
    """path.py:function trains as the same loss of the table does; what is no loss of tokens is named with its place."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    rows = experience_rows(policy)
    assert_same(
        loss_and_gradients(assemble_rl(rows, loss=f"{file}:plain")), loss_and_gradients(assemble_rl(rows)), 1e-6
    )
    whole = assemble_rl(rows, loss=f"{file}:whole")
    assert loss_and_gradients(whole)[0] == pytest.approx(
        loss_and_gradients(assemble_rl(rows, loss="asymre", baseline_shift=0.0))[0], rel=1e-6
    )
    for name, message in (
        ("mean", r"got a loss of shape \(\), expected \(4, \d+\), one number per token"),
        ("infinite", r"got -?inf for token \d+ of sequence \d+ of a batch"),
        ("broken", r"raised KeyError: 'no' \(.*mine.py:16"),
        ("missing", "missing"),
    ):
        with pytest.raises(UsageError, match=message):
            loss_and_gradients(assemble_rl(rows, loss=f"{file}:{name}"))
