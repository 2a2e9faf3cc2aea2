"""The shipped sweep over a dump: rollouts that another trainer wrote, trained and evaluated in every cell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

import gymdata
from gymdata.commands.sweep.run import SweepPlan, SweepReport

SAMPLE_DATA = Path(__file__).parents[2] / "sample_data"
FILE = SAMPLE_DATA / "sweep-dump.yaml"


def test_the_shipped_file_has_two_estimators_two_losses_and_three_seeds(tmp_path: Path) -> None:
    """All commands of its twelve cells are read: experience, train-rl, eval."""
    plan = gymdata.sweep(FILE, output=tmp_path / "sweep", dry_run=True)
    assert isinstance(plan, SweepPlan)
    assert plan.cells == 2 * 2 * 3
    assert {tuple(step.split()[0] for step in steps) for steps in plan.steps.values()} == {
        ("experience", "train-rl", "eval")
    }


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.timeout(3600)
def test_cells_of_a_dump_train_other_weights_and_are_compared_by_task_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One estimator, two losses and two seeds of the shipped file, on a batch of verl's that was imported."""
    pytest.importorskip("vllm")
    shutil.copytree(SAMPLE_DATA, tmp_path / "sample_data")
    monkeypatch.chdir(tmp_path)
    gymdata.export("sample_data/rollouts/clean.jsonl", "runs/tq_batch.pt", "verl-skip")
    assert gymdata.import_rollouts("runs/tq_batch.pt", "runs/dump").rollouts == 24
    facts = yaml.safe_load(FILE.read_text())
    facts |= {"grid": {"estimator": ["grpo"], "loss": ["cispo", "ppo_clip"]}, "seeds": [1, 2]}
    facts["steps"] = [step.replace("-n 200", "-n 8") for step in facts["steps"]]
    Path("sweep.yaml").write_text(json.dumps(facts))
    report = gymdata.sweep("sweep.yaml")
    assert isinstance(report, SweepReport)
    assert (report.done, report.failed) == (4, {})
    assert [sentence for sentence in report.alike if "weights" in sentence] == []
    baseline, other = report.combinations
    assert baseline.difference is None
    assert other.difference is not None
    assert (other.difference["n"], other.difference["seeds"]) == (8, 2)
    assert "| grpo | cispo |" in (report.path / "results.md").read_text()
