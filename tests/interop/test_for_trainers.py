"""Exports for other trainers, each line as a literal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.interop.formats.input_ids import MESSAGES, NO_TOKENS, RENDERED
from gymdata.interop.formats.trl_kto import UNLABELLED
from gymdata.interop.text_export import LOG_PROBS, REWARDS
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import sequences
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.rollout_files import rollout, two_turns, write_run
from tests.rollout_shapes import BREAK, SHAPES

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rewards_become_labels_of_kto_and_come_back_as_rewards(tmp_path: Path) -> None:
    """Above 0.5 desirable, below it not; on it, and without a reward, a rollout has no label and is left out by name."""
    rewards = [1.0, 0.0, 0.5, None, -3.0]
    rows = [rollout("a", n, reward, [([1, 2], [n, 3])], tools=json.dumps(TOOLS)) for n, reward in enumerate(rewards)]
    silent = rollout("a", 5, 1.0, [], messages=[{"role": "user", "content": "question a"}])
    done = gymdata.export(write_run(tmp_path / "run", [*rows, silent]), tmp_path / "kto.jsonl", "trl-kto")
    assert (done.rows_out, done.skipped) == (3, 3)
    assert (done.lost[UNLABELLED], done.lost[REWARDS]) == (2, 4)
    prompt = [{"role": "user", "content": "question a"}]
    assert lines(tmp_path / "kto.jsonl") == [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": said}], "tools": TOOLS, "label": label}
        for said, label in (("0 3", True), ("1 3", False), ("4 3", False))
    ]
    assert gymdata.import_rollouts(tmp_path / "kto.jsonl", tmp_path / "back").ok
    back = to_rows(read_table(tmp_path / "back", ROLLOUTS))
    assert [(row["reward"], row["rewards"], json.loads(row["tools"])) for row in back] == [
        (value, {"label": value}, TOOLS) for value in (1.0, 0.0, 0.0)
    ]


def test_labels_are_of_the_score_that_is_named(tmp_path: Path) -> None:
    row = rollout("a", 0, 1.0, two_turns(5, 40), rewards=[{"name": "style", "value": 0.25}])
    gymdata.export(write_run(tmp_path / "run", [row]), tmp_path / "kto.jsonl", "trl-kto", reward="style")
    (line,) = lines(tmp_path / "kto.jsonl")
    assert line["label"] is False
    assert [message["role"] for message in line["completion"]] == ["assistant", "tool", "assistant"]


#: Two turns in one sequence, a break that makes two, no tokens, and nothing sampled.
CUT = [two_turns(5, 40), BREAK, [], [([1, 2], [])]]
LABELS = [
    {"input_ids": [1, 5, 10, 11, 2, 30, 31, 40, 2], "labels": [-100, -100, 10, 11, 2, -100, -100, 40, 2]},
    {"input_ids": [1, 5, 10, 2, 7, 11, 2], "labels": [-100, -100, 10, 2, -100, 11, 2]},
    {"input_ids": [1, 6, 9, 12, 13], "labels": [-100, -100, -100, 12, 13]},
]


@pytest.mark.parametrize("workers", [1, 2])
def test_input_ids_and_labels_are_the_exact_ids_and_the_mask(workers: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [rollout("a", n, 1.0, calls) for n, calls in enumerate(CUT)])
    done = gymdata.export(run, tmp_path / "ids.jsonl", "input-ids-labels", workers=workers)
    assert lines(tmp_path / "ids.jsonl") == [row | {"attention_mask": [1] * len(row["input_ids"])} for row in LABELS]
    assert (done.rows_out, done.skipped) == (3, 2)
    assert done.lost == {NO_TOKENS: 2, REWARDS: 4, LOG_PROBS: 2, MESSAGES: 2}


def test_a_sequence_of_skyrl_has_its_ids_and_its_whole_mask(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [rollout("a", n, 1.0, calls) for n, calls in enumerate(CUT)])
    gymdata.export(run, tmp_path / "ids.jsonl", "skyrl-pretokenized")
    assert lines(tmp_path / "ids.jsonl") == [
        {"input_ids": row["input_ids"], "loss_mask": [int(label != -100) for label in row["labels"]]} for row in LABELS
    ]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["input-ids-labels", "skyrl-pretokenized"])
def test_data_sets_load_what_was_sampled_whatever_its_shape(name: str, tmp_path: Path) -> None:
    """HF datasets reads columns of equal types; the tokens with a label are those of the mask, literally."""
    from datasets import load_dataset

    run = write_run(tmp_path / "run", [rollout("a", n, None, calls) for n, calls in enumerate(SHAPES)])
    gymdata.export(run, tmp_path / "ids.jsonl", name)
    cache = str(tmp_path / "cache")
    loaded = load_dataset("json", data_files=str(tmp_path / "ids.jsonl"), split="train", cache_dir=cache)
    made = [one for row in to_rows(read_table(run, ROLLOUTS)) for one in sequences(row["turns"])]
    made = [one for one in made if one.loss_mask[1:].any()]
    assert loaded["input_ids"][:] == [one.input_ids.tolist() for one in made]
    masks = [one.loss_mask.tolist() for one in made]
    if name == "skyrl-pretokenized":
        assert loaded["loss_mask"][:] == masks
    else:
        assert [[int(label != -100) for label in row] for row in loaded["labels"]] == masks
        assert set(loaded.column_names) == {"input_ids", "attention_mask", "labels"}


def test_that_ids_were_rendered_is_told(tmp_path: Path) -> None:
    row = rollout("a", 0, 1.0, [([1, 2], [3, 4])])
    row["turns"][0]["rendered"] = True
    done = gymdata.export(write_run(tmp_path / "run", [row]), tmp_path / "ids.jsonl", "input-ids-labels")
    assert (done.rows_out, done.lost[RENDERED]) == (1, 1)
