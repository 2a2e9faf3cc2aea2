"""A power cut at any moment of a recording: a call that was synced is in an open session or in its rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.record.log import SessionLog
from gymdata.commands.record.sessions import Session
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import Run, read_table
from tests.crash_states import plant, recording, wrong_states
from tests.store.conftest import make_row


def open_run(folder: Path) -> Run:
    return Run.open(folder, identity={}, extent={}, operation={}, run_id="run", fsync_interval_s=3600)


def call(log: SessionLog, session: Session, number: int) -> None:
    """What a session has in the journal; its last event counts its calls."""
    event = {"spent": str(number)}
    log.append(session, event)
    session.add(event)


def faults_of(folder: Path, promises: list[Any]) -> str | None:
    """What is wrong for a recorder that goes on with these files; None if nothing."""
    if not (folder / "run.json").exists():
        return "run.json is gone" if promises else None
    with open_run(folder) as run:
        log = SessionLog(run)
        is_open = {session.rollout_id: int(session.spent or "1") for session in log.read()}
        log.close()
    written = read_table(folder, ROLLOUTS, ["rollout_id"])["rollout_id"].to_pylist()
    for rollout, number in promises:
        if rollout not in written and is_open.get(rollout, 0) < number:
            return f"of {number} calls of {rollout}, {is_open.get(rollout, 0)} are there, and no row"
    return f"rows {written}" if len(set(written)) < len(written) else None


def wrong_of_sessions(tmp_path: Path) -> tuple[int, list[str]]:
    """States tried and what is wrong, where three sessions whose calls are on the disk end before their rows are."""
    folder = tmp_path / "work" / "run"
    folder.parent.mkdir()
    sessions = [Session(f"key-{n}", f"{n:032x}") for n in range(3)]
    with recording(folder.parent) as made, open_run(folder) as run:
        log = SessionLog(run)
        for number in (1, 2):
            for session in sessions:
                call(log, session, number)
            log.sync()
            for session in sessions:
                made.promise((session.rollout_id, number))
        for n, session in enumerate(sessions):
            run.append(make_row(n, n_turns=1))
            log.drop(session, at_once=n == 1)
        log.close()
    return wrong_states(made, tmp_path / "left", lambda left, promises: faults_of(left / "run", promises))


def test_no_call_is_lost_that_was_synced(tmp_path: Path) -> None:
    """In every state that a power cut can leave, each is in an open session or its rollout is there, once."""
    tried, wrong = wrong_of_sessions(tmp_path)
    assert wrong == []
    assert tried > 30


@pytest.mark.full
def test_a_session_that_leaves_before_its_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the rows are not brought to the disk before their sessions leave the journal."""
    plant(monkeypatch, SessionLog, "_leave", "self._run.sync()", "pass")
    assert wrong_of_sessions(tmp_path)[1]
