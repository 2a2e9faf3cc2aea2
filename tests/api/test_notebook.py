"""What a notebook shows of a result, dry runs, and modules of folders that have a function's name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gymdata

SAMPLE = Path(gymdata.__file__).parent.parent / "sample_data" / "rollouts"


def test_a_result_is_a_table_in_a_notebook(tmp_path: Path) -> None:
    """``_repr_html_`` has the summary's names and values, escaped; of a validation the codes, or how many rollouts can be
    trained, and its short form counts the violations by code."""
    shown = gymdata.filter(SAMPLE / "clean.jsonl", tmp_path / "<b>", where=["reward > 0"])._repr_html_()
    for text in ("<caption>FilterReport</caption>", "<th style='text-align: left'>written to</th>", "&lt;b&gt;"):
        assert text in shown
    broken, clean = (gymdata.validate(SAMPLE / f"{name}.jsonl") for name in ("broken", "clean"))
    assert "'T209': 3" in repr(broken)
    assert "T209" in broken._repr_html_()
    assert "<th style='text-align: left'>trainable</th><td>24 of 24 rollouts</td>" in clean._repr_html_()


def test_an_interval_is_shown_with_its_bounds(tmp_path: Path) -> None:
    """In the short form of a result, and not as how many bounds it has."""
    scored = gymdata.score(SAMPLE / "clean.jsonl", reward="numeric", output=tmp_path / "scores")
    assert re.search(r"ci95=\(0\.\d+, 0\.\d+\)", repr(scored)), repr(scored)


def test_a_module_of_a_folder_with_a_function_s_name_is_imported() -> None:
    """``import gymdata.finetune.port as port`` and ``gymdata.finetune.port`` work, and the function stays the function."""
    code = (
        "import gymdata, gymdata.finetune.port as port; assert gymdata.finetune.port is port;"
        "import gymdata.finetune.state; assert gymdata.finetune.state.__name__ == 'gymdata.finetune.state';"
        "assert callable(gymdata.finetune)"
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


def test_a_run_a_rollout_and_a_group_are_cells() -> None:
    """A run lists prompts and answers; a rollout and a group are frames that run nothing, with all data escaped."""
    run = gymdata.open(SAMPLE / "clean.jsonl")
    listed = run._repr_html_()
    assert ">answer</th>" in listed
    first = gymdata.load_rollouts(SAMPLE / "clean.jsonl", ["rollout_id", "group_id"]).to_pylist()[0]
    rollout = run.rollout(first["rollout_id"])
    assert rollout["rollout_id"] == first["rollout_id"]
    for cell in (rollout._repr_html_(), run.group(first["group_id"])._repr_html_()):
        assert cell.startswith("<iframe sandbox srcdoc=")
        assert "<script" not in cell
    with pytest.raises(gymdata.errors.DataError, match="group_id"):
        run.group("nothing")


def test_a_pair_and_a_report_are_cells(tmp_path: Path) -> None:
    """The pair from where its sides differ; the page of the report, in a frame."""
    gymdata.pairs(SAMPLE / "clean.jsonl", output=tmp_path / "pairs")
    pair = gymdata.query("SELECT pair_id FROM pairs LIMIT 1", tmp_path / "pairs").to_pylist()[0]["pair_id"]
    cell = gymdata.open(tmp_path / "pairs").pair(pair)._repr_html_()
    assert "margin" in cell
    report = gymdata.report(SAMPLE / "clean.jsonl", write=False)._repr_html_()
    assert report.startswith("<iframe sandbox srcdoc=")
    assert "content-security-policy" in report.lower()
