"""What ``record`` keeps to in thousands of schedules: see ``played`` for what is drawn and what is checked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.record.ending import FAILED, Ending
from gymdata.commands.record.log import SessionLog
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.request import Client
from tests.record.played import asked_of, play, recorder_of
from tests.seeded_loop import found, play_all, seeded

SCHEDULES = 400


@pytest.mark.matrix("0")
@pytest.mark.parametrize("block", range(25))
def test_every_turn_is_in_one_row_and_every_client_answered(block: int, tmp_path: Path) -> None:
    """Whoever goes away, asks again or in parallel, finishes twice or never, and whatever fails, is stopped or killed."""
    play_all(range(block * SCHEDULES, (block + 1) * SCHEDULES), partial(play, tmp_path))


def test_a_request_that_came_before_its_session_failed_begins_the_next(tmp_path: Path) -> None:
    """One of two agents reports a failure between the arrival of the other's request and its first step. The request took
    the session up again: its old turns were in the failure and in the row, and a restart could not read its journal."""

    async def main() -> list[int]:
        recorder = recorder_of(tmp_path)
        first = asked_of("q")
        session = recorder.session_for("k", first)
        await recorder.complete(session, first, Client())
        late = asked_of("another")
        session = recorder.session_for("k", late)
        await recorder.finish("k", Ending(FAILED))
        await recorder.complete(session, late, Client())
        await recorder.finish("k", Ending())
        recorder.log.close()
        return [len(part["turns"]) for part in (*recorder.run.failures(), *recorder.run.rows)]

    with seeded(0) as loop:
        assert loop.play(main()) == [1, 1]


def test_a_call_that_is_not_journaled_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(SessionLog, "append", lambda self, session, event: None)
    assert "sampled was" in found(range(300), partial(play, tmp_path))


def test_an_idle_session_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def nothing(self: Any) -> None: ...

    monkeypatch.setattr(Recorder, "end_idle", nothing)
    assert "sessions are open" in found(range(100), partial(play, tmp_path))


def test_a_session_that_ends_under_a_call_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its finish does not wait for the answers in flight."""

    async def at_once(self: Any, session: Any) -> None: ...

    monkeypatch.setattr(Recorder, "answered", at_once)
    assert found(range(400), partial(play, tmp_path))
