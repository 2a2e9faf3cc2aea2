"""``gymdata check --agent`` says what an agent needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gymdata.check.agents import check_agent
from gymdata.errors import UsageError
from gymdata.record.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_missing_agent_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """And found once its command is there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    report = check_agent(name)
    assert (report.path, report.exit_code) == (None, 1)
    assert ("  what to do", f"npm install -g {PRESETS[name].package}") in report.rows()
    command = tmp_path / PRESETS[name].words[0]
    command.touch(mode=0o755)
    report = check_agent(name)
    assert (report.path, report.exit_code) == (str(command), 0)


def test_an_unknown_name_is_refused() -> None:
    """With the names that there are."""
    with pytest.raises(UsageError, match="codex"):
        check_agent("codx")


def test_a_command_is_looked_for() -> None:
    """As collect would."""
    assert check_agent("true {prompt}").path in (f"{folder}/true" for folder in os.get_exec_path())
