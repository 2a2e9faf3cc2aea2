"""One file of answers or preferences as text, one command, a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import gymdata
from gymdata.chat.template import TransformersChat
from gymdata.cli.main import main
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.turns import sequences
from gymdata.store import read_run_json, read_table
from gymdata.store.columns import to_rows

pytestmark = pytest.mark.torch

POLICY = "sample_data/policy"
CONVERSATION = [{"role": "user", "content": "How much is 2+3?"}, {"role": "assistant", "content": "5"}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("mask", "trained"), [("completion", "Yes."), ("assistant", "5Yes."), ("last", "Yes.")])
def test_the_mask_says_which_messages_are_trained(mask: str, trained: str, tmp_path: Path) -> None:
    prompt = [*CONVERSATION, {"role": "user", "content": "Sure?"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "Yes."}]}
    gymdata.import_rollouts(write(tmp_path / "rows.jsonl", row), tmp_path / "text")
    gymdata.tokenize(tmp_path / "text", tmp_path / "tokens", tokenizer=POLICY, mask=mask)
    (rollout,) = to_rows(read_table(tmp_path / "tokens"))
    (sequence,) = sequences(rollout["turns"])
    chat = TransformersChat.load(POLICY)
    ids = sequence.input_ids[sequence.loss_mask == 1].tolist()
    assert chat.tokenizer.decode(ids, skip_special_tokens=True) == trained


def test_a_message_of_weight_0_is_not_trained(tmp_path: Path) -> None:
    row = {
        "messages": [
            CONVERSATION[0],
            {**CONVERSATION[1], "weight": 0},
            CONVERSATION[0],
            {**CONVERSATION[1], "content": "six"},
        ]
    }
    gymdata.import_rollouts(write(tmp_path / "rows.jsonl", row), tmp_path / "text", source="openai")
    report = gymdata.tokenize(tmp_path / "text", tmp_path / "tokens", tokenizer=POLICY)
    (rollout,) = to_rows(read_table(tmp_path / "tokens"))
    assert (report.turns, [m["turn"] for m in rollout["messages"]]) == (1, [None, None, None, 0])


def test_a_file_of_answers_is_trained_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again resumes it; rows that cannot be used are counted with the first reason."""
    rows = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:1]}, {"messages": [*CONVERSATION, *CONVERSATION]}]
    file = write(tmp_path / "chat.jsonl", rows[0], rows[1], rows[2])
    command = ["train-sft", str(file), "-m", POLICY, "-o", str(tmp_path / "policy"), "--set", "max_steps=1"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "contains chat messages with answers (3 rows)" in said
    assert "left out: 1 row that cannot be used (first: line 2: no message of the assistant)" in said
    facts = read_run_json(tmp_path / "policy")
    assert facts["trained_tokens"]["equal"]
    assert facts["counts"]["rollouts_chosen"] == 2
    assert facts["parents"][0]["path"].endswith("policy/data/tokens")
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize("trainer", ["dpo", "reward"])
def test_preferences_are_trained_by_one_command(trainer: str, tmp_path: Path) -> None:
    """Their margins are not known, which is refused only where a loss reads them."""
    rows = [{"prompt": f"How much is 2+{n}?", "chosen": str(2 + n), "rejected": str(3 + n)} for n in range(4)]
    file, out = write(tmp_path / "rows.jsonl", *rows), tmp_path / "model"
    train: Any = getattr(gymdata, f"train_{trainer}")
    report = (
        train(file, POLICY, out, dry_run=True, split=0.0)
        if trainer == "reward"
        else train(file, POLICY, out, dry_run=True)
    )
    assert report.counts["pairs"] == 4
    assert not out.exists()
    with pytest.raises(DataError, match="4 pairs have no margin"):
        train(file, POLICY, out, dry_run=True, margin_scale=1.0, **({"split": 0.0} if trainer == "reward" else {}))


def test_labels_are_trained_by_one_command(tmp_path: Path) -> None:
    """True is desirable, also where a prompt has a single answer."""
    rows = [{"prompt": f"How much is 2+{n}?", "completion": "4", "label": n == 2} for n in range(4)]
    report = gymdata.train_kto(write(tmp_path / "rows.jsonl", *rows), POLICY, tmp_path / "model", dry_run=True)
    assert (report.counts["desirable"], report.counts["undesirable"]) == (1, 3)


def test_text_for_another_trainer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "x", "chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match="contains preference pairs, expected rollouts") as error:
        gymdata.train_sft(pairs, POLICY, tmp_path / "model")
    assert "train-dpo" in str(error.value.hint)
    for train in (gymdata.train_rl, gymdata.train_value):
        with pytest.raises(UsageError, match="takes tokens that a policy sampled"):
            train(pairs, POLICY, tmp_path / "model")
    assert not (tmp_path / "model").exists()
