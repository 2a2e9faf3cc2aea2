"""Exports for other trainers, each line as a literal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymdata
from gymdata.interop.formats.trl_kto import UNLABELLED
from gymdata.interop.text_export import REWARDS
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.rollout_files import rollout, two_turns, write_run

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
