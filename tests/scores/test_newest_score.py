"""Which score a command means without --reward: the newest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import UsageError
from gymdata.rollouts.schema import SCORES
from gymdata.scores.chosen import default_score
from gymdata.store import read_run_json, write_run_json, write_table
from tests.rollout_files import rollout, two_turns, write_run


def write_scores(run: Path, name: str, values: dict[int, float]) -> None:
    """RUN/scores-NAME as `gymdata score` leaves it: by rollout index, failed for the others."""
    rows = [
        {"rollout_id": row["rollout_id"], "name": name, "value": values.get(row["rollout_index"]), "source": "function",
         "status": "scored" if row["rollout_index"] in values else "failed", "run_id": "r", "detail": "no answer"}
        for row in gymdata.load_rollouts(run).select(["rollout_id", "rollout_index"]).to_pylist()
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=SCORES.schema)
    write_table(table, run / f"scores-{name}" / "scores.parquet", SCORES)
    write_run_json(run / f"scores-{name}", {"stage": "score"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which every rollout has the reward 0, scored again by its index."""
    rows = [rollout(f"t{k}", i, 0.0, two_turns(1, 5 + i + 10 * k)) for k in range(2) for i in range(3)]
    folder = write_run(tmp_path / "run", rows)
    write_scores(folder, "mine", {0: 0.0, 1: 1.0, 2: 2.0})
    return folder


def test_pairs_are_made_by_the_newest_score(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says which, and its name is that of the folder; run.json has it as a setting and as a parent."""
    assert main(["pairs", str(run)]) == 0
    assert "score: mine, the newest of these rollouts" in capsys.readouterr().err
    facts = read_run_json(run / "pairs-mine")
    assert facts["config"]["reward"] == "mine"
    assert str((run / "scores-mine").resolve()) in [parent["path"] for parent in facts["parents"]]


def test_a_result_without_pairs_writes_nothing_and_names_the_scores(run: Path, capsys: pytest.CaptureFixture[str]):
    """The total reward has no variance: no folder is left, and train-dpo RUN has one folder to choose."""
    assert main(["pairs", str(run), "--reward", "reward"]) == 1
    shown = capsys.readouterr().err
    assert "or choose another score: --reward mine; nothing was written" in shown
    assert not (run / "pairs-reward").exists()


def test_the_later_of_two_scores_counts_and_one_without_values_does_not(run: Path) -> None:
    """Of runs of which one lacks a score, that score is not the default; a named one always counts."""
    write_scores(run, "later", {0: 1.0})
    os.utime(run / "scores-mine" / "run.json", ns=(1, 1))
    assert default_score([run], None)[0] == "later"
    write_scores(run, "broken", {})
    assert default_score([run], None)[0] == "later"
    assert default_score([run], "mine") == ("mine", None)
    other = write_run(run.parent / "other", [rollout("t9", 0, 1.0, two_turns(1, 90))])
    assert default_score([run, other], None) == (None, None)


def test_experience_and_filter_use_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward that experience credits and that a filter compares; what is filtered keeps its own reward."""
    assert main(["experience", str(run), "--estimator", "grpo"]) == 0
    assert read_run_json(run / "experiences-grpo")["config"]["reward"] == "mine"
    assert main(["filter", str(run), "--where", "reward > 1.5", "-o", str(run.parent / "kept")]) == 0
    assert "reward is the score 'mine'" in capsys.readouterr().err
    kept = gymdata.load_rollouts(run.parent / "kept")
    assert (kept["rollout_index"].to_pylist(), kept["reward"].to_pylist()) == ([2, 2], [0.0, 0.0])


@pytest.mark.parametrize("named", [[], ["--reward", "mine"]])
def test_show_best_prints_the_score(run: Path, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The rollout with the highest score, and that score."""
    assert main(["show", str(run), "--best", *named]) == 0
    assert "score mine" in capsys.readouterr().out
    assert main(["show", str(run), "--best", *named, "--json"]) == 0
    (best,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert (best["rollout_index"], best["score"]) == (2, {"name": "mine", "value": 2.0})


def test_a_score_that_is_not_there_is_refused_by_name(run: Path) -> None:
    """With those that are."""
    with pytest.raises(UsageError, match="got 'yours'") as raised:
        gymdata.pairs(run, reward="yours")
    assert "mine" in str(raised.value.hint)
