"""What a user's code raises, and what is nested too deeply, is never called a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.cli.main import main
from tests.rollout_files import rollout, two_turns, write_run


@pytest.mark.parametrize("command", ["pairs", "experience"])
def test_rewards_that_are_one_number_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """More rollouts or a higher temperature are no advice where every reward of the run is the same."""
    rows = [rollout(f"t{k // 4}", k % 4, 0.0, two_turns(1, 50 + k)) for k in range(8)]
    write_run(tmp_path / "run", rows)
    assert main([command, str(tmp_path / "run")]) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "is 0: is it right?" in shown
    assert "temperature" not in shown
