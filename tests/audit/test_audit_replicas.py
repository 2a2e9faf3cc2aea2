"""``gymdata audit --replicas``: engines on Ray score the tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.errors import UsageError
from gymdata.store import read_run_json
from tests.rollout_files import write_run

POLICY = Path(__file__).parents[2] / "sample_data" / "policy"


@pytest.fixture
def run(clean_rows: list[dict[str, Any]], tmp_path: Path) -> Path:
    """Rollouts of the sample policy, sampled at temperature 1."""
    return write_run(tmp_path / "run", [copy.deepcopy(row) for row in clean_rows[:20]])


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.torch
def test_a_replica_of_vllm_gives_the_figures_of_a_forward_pass_here(run: Path) -> None:
    """The same tokens are scored, nothing is found, and the model is the one in the folder; Ray is gone afterwards."""
    ray = pytest.importorskip("ray")
    engine = {"max_model_len": 512, "dtype": "float32"}
    report = gymdata.audit(run, str(POLICY), replicas=1, tolerance=1e-2, engine=engine, output=run / "ray")
    here = gymdata.audit(run, str(POLICY), dtype="float32", device="cpu", tolerance=1e-2, output=run / "here")
    assert report.ok
    assert here.ok
    for name in ("tokens", "rollouts", "turns"):
        assert report.summary[name] == here.summary[name]
    assert report.summary["mean_abs_difference"] == pytest.approx(here.summary["mean_abs_difference"], abs=1e-4)
    facts = read_run_json(run / "ray")["model"]
    assert facts["policy_hash"] == read_run_json(run / "here")["model"]["policy_hash"]
    assert facts["dtype"] == "float32"
    assert [server["generations"] for server in facts["servers"]] == [report.summary["rollouts"]]
    assert not ray.is_initialized()


def test_what_does_not_go_together_is_refused(run: Path) -> None:
    """Replicas beside servers, and beside settings of a forward pass in this process."""
    with pytest.raises(UsageError, match="--endpoint and --replicas"):
        gymdata.audit(run, str(POLICY), replicas=1, endpoint="http://127.0.0.1:9")
    with pytest.raises(UsageError, match="--device cpu and --replicas were both given"):
        gymdata.audit(run, str(POLICY), replicas=1, device="cpu")
    with pytest.raises(UsageError, match="without replicas="):
        gymdata.audit(run, str(POLICY), ray="auto")
