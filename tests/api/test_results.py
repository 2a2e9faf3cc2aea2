"""The short forms of results, dry runs, and modules of folders that have a function's name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gymdata

SAMPLE = Path(gymdata.__file__).parent.parent / "sample_data" / "rollouts"


def test_the_short_form_of_a_validation_counts_by_code() -> None:
    """And the summary says how many rollouts can be trained."""
    broken, clean = (gymdata.validate(SAMPLE / f"{name}.jsonl") for name in ("broken", "clean"))
    assert "'T209': 3" in repr(broken)
    assert ("trainable", "24 of 24 rollouts") in clean.rows()


def test_a_rollout_of_an_opened_run_has_its_prompts() -> None:
    """It is found by its id, and its turns have the whole prompts; an unknown id is an error."""
    run = gymdata.open(SAMPLE / "clean.jsonl")
    first = gymdata.load_rollouts(SAMPLE / "clean.jsonl", ["rollout_id"])["rollout_id"][0].as_py()
    rollout = run.rollout(first)
    assert rollout["rollout_id"] == first
    assert all(turn["prompt_token_ids"] for turn in rollout["turns"])
    with pytest.raises(gymdata.errors.DataError, match="rollout_id"):
        run.rollout("nothing")


def test_an_interval_is_shown_with_its_bounds(tmp_path: Path) -> None:
    """In the short form of a result, and not as how many bounds it has."""
    scored = gymdata.score(SAMPLE / "clean.jsonl", reward="numeric", output=tmp_path / "scores")
    assert re.search(r"ci95=\(0\.\d+, 0\.\d+\)", repr(scored)), repr(scored)


def test_a_command_s_name_is_its_function_whatever_is_imported() -> None:
    """Its room is gymdata.commands.NAME."""
    code = (
        "import gymdata, gymdata.commands.finetune.port, gymdata.commands.finetune.state;"
        "assert callable(gymdata.finetune); assert gymdata.finetune.__name__ == 'finetune'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.torch
def test_dry_run_is_a_keyword_wherever_it_is_a_flag(tmp_path: Path) -> None:
    """``collect(…, dry_run=True)`` says what would be sampled, and ``filter`` what would stay; neither writes."""
    tasks = [{"task_id": "t", "prompt": "How much is 1+1?", "answer": "2"}]
    model = SAMPLE.parent / "policy"
    planned = gymdata.collect(tasks, model=str(model), output=tmp_path / "run", num_rollouts=3, dry_run=True)
    assert (planned.tasks, planned.rollouts_wanted) == (1, 3)
    kept = gymdata.filter(SAMPLE / "clean.jsonl", tmp_path / "kept", where=["reward > 0"], dry_run=True)
    assert kept.rows()
    assert list(tmp_path.iterdir()) == []
