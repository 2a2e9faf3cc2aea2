"""Rollouts of a real model in bfloat16 are its own to ``audit`` in either number format, and no other temperature's."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymdata
from gymdata.store import read_run_json, read_table, write_run_json
from tests import model_files
from tests.rollout_files import write_run

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.torch, pytest.mark.timeout(1800)]


@pytest.mark.skipif(bool(model_files.smollm2_missing()), reason=model_files.smollm2_missing())
def test_rollouts_of_a_bfloat16_model_are_its_own(tmp_path: Path) -> None:
    """Sampled by vLLM in the checkpoint's format, which run.json records; rows that say another temperature are not."""
    model, run = model_files.make_smollm2(tmp_path / "model"), tmp_path / "run"
    tasks = [{"task_id": f"t{n}", "prompt": f"{n} + {n + 1} = ? Explain it in a sentence."} for n in range(6)]
    gymdata.collect(tasks, model=str(model), output=run, num_rollouts=2, temperature=0.8, max_tokens=32, seed=1)
    facts = read_run_json(run)
    assert facts["engine"]["dtype"] == "bfloat16"
    for scorer in ("bfloat16", "float32"):
        report = gymdata.audit(run, str(model), tmp_path / scorer, dtype=scorer, device="cpu")
        assert report.ok, report.summary["departures"]
    rows = [row | {"temperature": 1.0} for row in read_table(run).to_pylist()]
    other = write_run(tmp_path / "other", rows)
    kept = {name: facts[name] for name in ("stage", "engine", "identity", "policy")}
    write_run_json(other, read_run_json(other) | kept)
    report = gymdata.audit(other, str(model), tmp_path / "other-audit", dtype="float32", device="cpu")
    assert report.explanation is not None
    assert report.explanation.cause == "temperature"
    assert "are of 0.8, the rows say 1" in report.explanation.text
