"""The shipped rollouts: clean ones are clean, and every planted fault is found where it was planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymdata.commands.validate.run import validate
from gymdata.sample_data.make_rollouts import FAULTS

ROLLOUTS = Path(__file__).parents[2] / "sample_data" / "rollouts"


@pytest.mark.parametrize("name", ["clean", "nemo_gym"])
def test_clean_rollouts_have_no_finding(name: str) -> None:
    """Rollouts that the policy really played are validated without errors or warnings, in both shapes."""
    report = validate(ROLLOUTS / f"{name}.jsonl")
    assert report.rollouts >= 20
    assert [(v.row, v.turn, v.code) for v in report.violations] == []


def test_each_planted_fault_is_found_at_its_turn() -> None:
    """Row k of broken.jsonl gives the code of the k-th fault at its turn, and no other error."""
    report = validate(ROLLOUTS / "broken.jsonl")
    found = [(v.row, v.turn, v.code) for v in report.violations if v.severity == "error"]
    assert sorted(found, key=str) == sorted(((k, f.turn, f.code) for k, f in enumerate(FAULTS)), key=str)


def test_the_shapes_tell_of_the_same_rollouts() -> None:
    """The NeMo Gym file holds the ids, log-probabilities and rewards of clean.jsonl."""
    clean, foreign = (
        [json.loads(line) for line in (ROLLOUTS / f"{name}.jsonl").read_text().splitlines()]
        for name in ("clean", "nemo_gym")
    )
    for ours, theirs in zip(clean, foreign, strict=True):
        calls = [item for item in theirs["response"]["output"] if "prompt_token_ids" in item]
        assert [c["generation_token_ids"] for c in calls] == [t["generation_token_ids"] for t in ours["turns"]]
        assert [c["generation_log_probs"] for c in calls] == [t["generation_log_probs"] for t in ours["turns"]]
        assert theirs["reward"] == ours["reward"]
