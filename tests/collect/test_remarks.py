"""What collect says at its end: what the policy did that is odd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_odd_behavior_is_named_at_the_end(play: Callable[..., Any], tmp_path: Path) -> None:
    """Eight rollouts of one reward are B806 in the report, not again when nothing was to do, and none that differ."""
    (tmp_path / "zero.py").write_text("def zero(completions, **_):\n    return [0.0 for _ in completions]\n")
    summary, again = (play(8, rewards=[f"{tmp_path / 'zero.py'}:zero"])[0] for _ in range(2))
    assert summary.to_dict()["behavior"]["B806"] == "reward 0 for all 8 scored rollouts"
    assert "B806: reward 0 for all 8 scored rollouts (gymdata validate --explain B806)" in summary.remarks()
    assert again.remarks() == []
