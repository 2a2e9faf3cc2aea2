"""A user's file of rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gymdata.rewards import load_rewards
from gymdata.rewards.port import RewardFunction

Load = Callable[..., RewardFunction]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """The function ``f`` (or what ``spec`` names) of a file r.py with this text."""
    monkeypatch.chdir(tmp_path)

    def loaded(text: str, spec: str = "r.py:f") -> RewardFunction:
        (tmp_path / "r.py").write_text(text)
        ((function, _),) = load_rewards([spec])
        return function

    return loaded
