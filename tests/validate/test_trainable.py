"""What validate says of data that nothing can train, of no rows at all, and of files that are imported first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.import_export.run import import_rollouts
from gymdata.commands.validate.run import validate
from gymdata.errors import DataError
from gymdata.store import write_run_json
from tests.rollout_files import rollout, two_turns, write_run
from tests.validate.generate import native_rows, nemo_rows, with_ids, write_lines, write_native

KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
DPO = {"prompt": [{"role": "user", "content": "q"}], "chosen_response": "a", "rejected_response": "b"}


def without_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        for item in row["response"]["output"]:
            for key in KEYS:
                item.pop(key, None)
    return rows


@pytest.mark.parametrize("kind", ["nemo", "jsonl", "parquet"])
def test_trainable_counts_rollouts_with_ids_and_without_errors(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of six rollouts has an id out of range, and whatever codes are selected five can be trained."""
    if kind == "nemo":
        rows = nemo_rows(n=6)
        with_ids(rows[2], 1)["generation_token_ids"][0] = -1
        path = write_lines(tmp_path / "a.jsonl", rows)
    else:
        rows = native_rows(n=6)
        rows[2]["turns"][1]["digest"] += 1
        path = write_native(tmp_path, rows, kind)
    assert main(["validate", str(path), "--json", "--ignore", "R"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["trainable"], report["rollouts"]) == (5, 6)
    main(["validate", str(path), "--quiet"])
    assert capsys.readouterr().out.rstrip().endswith("trainable: 5 of 6 rollouts")


def test_a_file_without_ids_has_nothing_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real rollouts often have no ids: a warning for every model call, exit code 0, and none of its rollouts is trainable;
    errors when other rows have them."""
    rows = nemo_rows(n=2, turns=2)
    path = write_lines(tmp_path / "a.jsonl", without_ids(rows[1:]))
    report = validate(path, select=["T", "L", "M", "S"])
    assert [(v.code, v.turn, v.severity) for v in report.violations] == [("T205", 0, "warning"), ("T205", 1, "warning")]
    assert main(["validate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "trainable: 0 of 1 rollouts" in shown
    assert "no token ids: `gymdata import FILE -m MODEL -o RUN` renders ids" in shown
    mixed = validate(write_lines(tmp_path / "b.jsonl", rows), select=["T"])
    assert [(v.code, v.row, v.severity) for v in mixed.violations] == [("T205", 1, "error")] * 2
    import_rollouts(path, tmp_path / "run")
    assert validate(tmp_path / "run").trainable == 0


def test_pairs_are_counted_as_well(tmp_path: Path) -> None:
    """Pairs with ids of prompt and both sides are trainable; those of texts are not."""
    run = write_run(tmp_path / "run", [rollout("t", n, float(n), two_turns(5, 20 + n)) for n in range(2)])
    gymdata.pairs(run, output=tmp_path / "pairs")
    report = validate(tmp_path / "pairs")
    assert (report.rollouts, report.trainable) == (1, 1)
    import_rollouts(write_lines(tmp_path / "a.jsonl", [DPO]), tmp_path / "texts")
    report = validate(tmp_path / "texts")
    assert (report.rollouts, report.trainable) == (1, 0)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "blank"])
def test_no_rows_are_no_success(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was checked, so the exit code is 1."""
    if kind == "blank":
        path = tmp_path / "a.jsonl"
        path.write_text("\n \n")
    else:
        path = write_run(tmp_path / "run", [], kind)
    assert main(["validate", str(path)]) == 1
    shown = capsys.readouterr()
    assert "no rows to check" in shown.out
    assert (f"{path}: is empty (expected rollouts or pairs)" in shown.err) == (kind == "blank")


@pytest.mark.parametrize(("stage", "name"), [("train-dpo", "training"), ("score", "score"), ("audit", "audit")])
def test_a_folder_of_another_kind_is_named(stage: str, name: str, tmp_path: Path) -> None:
    """The output of a command that writes neither rollouts nor pairs is an error that says what it is, and not 0 rows."""
    write_run_json(tmp_path / "made", {"stage": stage})
    with pytest.raises(DataError, match=f"made: contains the output of {name}, expected rollouts or pairs") as caught:
        validate(tmp_path / "made")
    assert caught.value.exit_code == 2
    write_run_json(tmp_path / "begun", {"stage": "collect"})
    assert validate(tmp_path / "begun").exit_code == 1


def test_log_probs_that_are_not_there_are_not_biased(tmp_path: Path) -> None:
    """Greedy rollouts without a single log-probability are no L304, in their file and when they are imported."""
    rows = nemo_rows(n=4)
    for row in rows:
        row["responses_create_params"]["temperature"] = 0.0
        for turn in range(4):
            with_ids(row, turn).pop("generation_log_probs")
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert "L304" not in validate(path).by_code
    import_rollouts(path, tmp_path / "run")
    assert "L304" not in validate(tmp_path / "run").by_code
