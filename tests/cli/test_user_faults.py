"""What a user's code raises is never called a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.cli.main import main
from tests.finetune.parts import ROOT, write
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


ADAPTER = """
class Adapter:
    def __init__(self):
        {constructor}

    def data(self, algorithm):
        return 1 / 0

    def train(self, job, progress): ...
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("constructor", "said", "code"),
    [
        ("pass", "ZeroDivisionError: division by zero (adapter.py:7, in data)", 1),
        ("raise LookupError('no cluster')", "Adapter raised LookupError: no cluster (adapter.py:4, in __init__)", 2),
    ],
)
def test_what_a_finetuning_adapter_raises_names_its_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    constructor: str,
    said: str,
    code: int,
) -> None:
    """The user's file and line, whether its constructor or a method raised; nothing was begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter.py").write_text(ADAPTER.format(constructor=constructor))
    builder = {"builder": {"_type": f"{ROOT / 'tests' / 'finetune' / 'deterministic.py'}:Builder"}}
    adapter = {"adapter": {"_type": "adapter.py:Adapter"}}
    file = write(tmp_path, trajectory_builders=builder, trainer_adapters=adapter)
    assert main(["finetune", str(file)]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "defect" not in shown
    assert not list(tmp_path.glob("out/epoch-*"))
