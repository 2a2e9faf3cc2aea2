"""``train-sft``: which rollouts are chosen, and that exactly their sampled tokens are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.train.rollout_data import chosen_rollouts
from gymdata.errors import DataError, RefusedError
from gymdata.models.model_identity import model_facts
from gymdata.store import read_run_json, write_run_json
from tests.definition import sequences
from tests.rollout_files import BRANCH, BREAK, rollout, rollouts_table, training_data, two_turns, write_run
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch


def rows() -> list[dict[str, Any]]:
    return [
        rollout("a", 0, 0.5, two_turns(5, 40)), rollout("a", 1, 1.0, BREAK), rollout("a", 2, 1.0, two_turns(5, 41)),
        rollout("b", 0, None, two_turns(6, 42)), rollout("b", 1, 0.25, BRANCH), rollout("c", 0, None, two_turns(7, 43)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("select", "floor", "expected"),
    [
        ("best", None, ["a-1", "b-1"]),
        ("best", 0.5, ["a-1"]),
        ("above", None, ["a-0", "a-1", "a-2", "b-1"]),
        ("above", 1.0, ["a-1", "a-2"]),
        ("all", None, ["a-0", "a-1", "a-2", "b-0", "b-1", "c-0"]),
        ("all", 0.3, ["a-0", "a-1", "a-2"]),
    ],
)
def test_choice(select: Any, floor: float | None, expected: list[str]) -> None:
    """By reward within the group or by a floor; a missing reward is never a good one; the order of rows does not matter."""
    for order in (np.arange(6), np.array([5, 2, 4, 1, 3, 0])):
        table = rollouts_table([rows()[i] for i in order])
        assert sorted(table["rollout_id"].take(chosen_rollouts(table, select, floor)).to_pylist()) == expected


def test_what_is_trained_is_what_was_sampled() -> None:
    """Ids and masks of the sequences, a broken rollout in several, every sampled token once."""
    table = rollouts_table(rows())
    data = training_data("sft", table, select="above")
    expected = [
        (r["rollout_id"], s.input_ids.tolist(), s.loss_mask.tolist())
        for r in rows() if r["reward"] is not None for s in sequences(r["turns"])
    ]  # fmt: skip
    found = [(row["rollout_id"], row["input_ids"], row["loss_mask"]) for row in data.table.to_pylist()]
    assert sorted(found) == sorted(expected)
    with pytest.raises(DataError, match="is empty"):
        training_data("sft", table.slice(0, 0))
    with pytest.raises(RefusedError, match="R501"):
        training_data("sft", table, select="best", min_reward=2.0)


def test_copies_are_trained_once() -> None:
    """Of sequences with the same ids and mask the first is trained; those that differ only after the cut are copies."""
    calls = [two_turns(5, 40), two_turns(5, 40), two_turns(5, 41), BREAK, BREAK]
    table = rollouts_table([rollout("a", i, 1.0, call) for i, call in enumerate(calls)])
    data = training_data("sft", table, select="all")
    assert sorted(set(data.rollout_ids)) == ["a-0", "a-2", "a-3"]
    assert data.counts["rollouts_chosen"] == 5
    assert data.counts["left_out_duplicate"] == 1 + len(sequences(rollout("x", 0, 1.0, BREAK)["turns"]))
    every = training_data("sft", table, select="all", keep_duplicates=True)
    assert len(every) == len(data) + data.counts["left_out_duplicate"]
    assert [i for i in training_data("sft", table, select="all", max_length=7).rollout_ids if i in ("a-0", "a-2")] == [
        "a-0"
    ]


def test_the_command_lowers_the_loss(policy: Path, tmp_path: Path) -> None:
    """The proof holds, the loss is the mean −log π of the trained tokens at the start, and falls; nothing is left beside the
    rollouts."""
    import torch
    from transformers import AutoModelForCausalLM

    run = write_run(tmp_path / "run", rows())
    facts = model_facts(str(policy))
    identity = {"tokenizer_hash": facts.tokenizer_hash, "chat_template_hash": facts.chat_template_hash}
    write_run_json(run, {**read_run_json(run), "identity": identity})
    before = sorted(run.rglob("*"))
    done = gymdata("train-sft", run, "-m", policy, "-o", tmp_path / "out", "--select", "above", "--json",
                   "--set", "num_train_epochs=8", "--set", "learning_rate=3e-3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["trained_tokens"]["equal"] is True
    assert result["counts"]["rollouts_chosen"] == 4
    assert sorted(run.rglob("*")) == before
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    losses = []
    for row in rows():
        for s in sequences(row["turns"]) if row["reward"] is not None else []:
            ids = torch.tensor(s.input_ids[None].astype(np.int64))
            logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
            losses += [-float(logps[t - 1, ids[0, t]].detach()) for t in np.flatnonzero(s.loss_mask)]
    logged = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[:-1]]
    assert logged[0] == pytest.approx(np.mean(losses), abs=1e-3)
    assert logged[-1] < 0.9 * logged[0]
