"""A check of the user's own: one class in one file, named by --check or given to Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.errors import UsageError
from tests.rollout_files import rollout, two_turns, write_run

CHECK = '''
from gymdata.checks.violations import Check, code_pages


class Odd(Check):
    """Rewards of 1."""

    codes = code_pages("X901 odd reward (error): the reward is 1\\nLook at it.")

    def find(self, e):
        for r in range(e.n):
            if e.reward[r] == 1:
                yield self.at_rollout(e, r, "X901", got="1")
'''


def test_a_check_of_the_user_runs_beside_the_others(tmp_path: Path) -> None:
    """It is found at its row, selected by its code, explained in the report, and makes rows untrainable."""
    (tmp_path / "own.py").write_text(CHECK)
    for name in ("a", "b"):
        write_run(tmp_path / name, [rollout(f"{name}{n}", 0, float(n), two_turns(5, 9 + n)) for n in range(3)])
    spec = f"{tmp_path}/own.py:Odd"
    report = validate(f"{tmp_path}/*/rollouts/*.parquet", check=[spec])
    assert [(v.code, v.row, v.got, v.severity) for v in report.violations if v.code == "X901"] == [
        ("X901", 1, "1", "error")
    ] * 2
    sample = Path(gymdata.__file__).parent / "sample_data/rollouts/clean.jsonl"
    checked = validate(sample, check=[spec])
    assert checked.trainable == checked.rollouts - checked.by_code["X901"]
    assert validate(tmp_path / "a", check=[spec], select=["X9"]).by_code == {"X901": 1}


def test_the_command_takes_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check runs it; a class that is no check is refused by name."""
    (tmp_path / "own.py").write_text(CHECK + "\n\nclass Other:\n    pass\n")
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(5, 9))])
    assert main(["validate", str(run), "--check", f"{tmp_path}/own.py:Odd", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["by_code"]["X901"] == 1
    with pytest.raises(UsageError, match="Other"):
        gymdata.validate(run, check=[f"{tmp_path}/own.py:Other"])
