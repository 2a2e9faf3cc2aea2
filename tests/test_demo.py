"""The demo on real parts: its figures can be recomputed, and every file leads back to the one before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.demo.run import demo, summarise, summarise_judged
from gymdata.errors import StoreError, UsageError
from gymdata.store import read_run_json
from gymdata.store.lineage import lineage


@pytest.mark.full
@pytest.mark.engine
def test_a_small_demo_leaves_a_chain_from_checkpoint_to_tasks(tmp_path: Path):
    """One round on a few tasks trains what it sampled, from rewards and from comparisons; the summary says what the sealed
    runs say."""
    out = tmp_path / "demo"
    report = demo(out, rounds=1, num_rollouts=4, limit=24, judged_groups=12, threshold=False, say=lambda _: None)
    summary = report.to_dict()
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["breaks"] == 0
    assert summary["before"]["n"] == summary["after"]["n"] == 24
    again = summarise(
        out / "heldout-before", out / "heldout-after", [out / "round-1" / "rollouts"], [out / "round-1" / "policy"]
    )
    assert {key: summary[key] for key in again} == again
    trained = read_run_json(out / "round-1" / "policy")["trained_tokens"]
    assert trained["equal"]
    stages = [step["stage"] for step in lineage(out / "round-1" / "policy")]
    assert {"train-dpo", "pairs", "collect"} <= set(stages)

    judged = summary["judged"]
    assert judged == summarise_judged(out / "heldout-before", out / "heldout-judged", out / "round-1" / "rollouts")
    assert judged["before"] == summary["before"]
    assert judged["groups"] == 12
    assert sum(judged["comparisons"].values()) == 12 * 4 * 3
    assert (
        judged["accuracy"]["both_positions"]["n"] + judged["accuracy"]["called_equal"]["n"]
        == judged["comparisons"]["judged"]
    )
    assert read_run_json(out / "round-1" / "judged-policy")["trained_tokens"]["equal"]
    stages = [step["stage"] for step in lineage(out / "round-1" / "judged-policy")]
    assert {"train-dpo", "pairs", "judge", "collect"} <= set(stages)


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_demo_rises_by_ten_points(tmp_path: Path):
    """The shipped policy gains at least ten points on held-out tasks, with the paired interval above zero."""
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "gymdata.cli", "demo", "-o", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())


def test_what_is_not_installed_is_named_before_the_first_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and engine are missing: one command installs both, and nothing was written."""
    for name in ("vllm", "trl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="'vllm'") as missing:
        demo(tmp_path / "demo")
    assert "[train,cpu]" in str(missing.value.hint)
    assert not (tmp_path / "demo").exists()


def test_a_folder_of_somebody_elses_is_not_written_to(tmp_path: Path):
    """The demo refuses a folder with other files, with or without --overwrite."""
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(StoreError, match="not made by the demo"):
        demo(tmp_path, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "keep me"
