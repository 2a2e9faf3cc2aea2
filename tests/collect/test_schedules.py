"""What ``collect``'s loop keeps to in thousands of schedules: see ``played`` for what is drawn and what is checked."""

from __future__ import annotations

import asyncio

import pytest

from gymdata.commands.collect import loop
from gymdata.commands.collect.episode import Rollout
from gymdata.commands.collect.resume import AttemptTracker
from gymdata.engines.servers.many import Pool
from gymdata.errors import OutsideError
from tests.collect.played import play
from tests.seeded_loop import found, play_all, seeded

SCHEDULES = 800


@pytest.mark.matrix("0")
@pytest.mark.parametrize("block", range(25))
def test_every_attempt_is_one_row_or_one_failure(block: int) -> None:
    """With its own tokens, reason and reward, whatever fails, hangs, is late, is stopped, dropped, killed or goes away."""
    play_all(range(block * SCHEDULES, (block + 1) * SCHEDULES), play)


class Member:
    """A server that has ``fault`` for every request; keeps its requests."""

    default_concurrency = 1

    def __init__(self, base: str, fault: OutsideError) -> None:
        self.base, self.fault, self.asked = base, fault, 0

    async def start(self) -> dict[str, object]:
        return {}

    async def close(self) -> None: ...

    async def ask(self) -> None:
        self.asked += 1
        raise self.fault


def test_a_busy_server_is_not_asked_twice_because_another_is_gone() -> None:
    """A request that had used up its retries at one server, and then found the other gone, went back to the first at once,
    before the time that it had asked for and with all retries again."""
    faults = OutsideError("engine", "busy", retryable=True), OutsideError("engine", "gone", retryable=True, fatal=True)
    for key in "abcdef":  # whichever comes first
        busy, gone = (Member(fault.reason, fault) for fault in faults)
        with seeded(0) as event_loop, pytest.raises(OutsideError, match="busy"):
            event_loop.play(Pool([busy, gone]).ask(lambda member: member.ask(), key))
        assert (busy.asked, gone.asked) == (1, 1)


def test_a_retry_that_forgets_its_attempt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttemptTracker, "failed", lambda self, rollout_id, *, final=False: 1)
    assert "attempts are numbered [1, 1]" in found(range(100), play)


def test_a_failure_that_loses_its_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = loop.failure_record
    monkeypatch.setattr(loop, "failure_record", lambda *a: {**recorded(*a), "turns": []})
    assert "a failure lacks what was sampled" in found(range(100), play)


def test_a_dead_engine_that_costs_an_attempt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = loop.failure_record
    monkeypatch.setattr(loop, "failure_record", lambda *a: {**recorded(*a), "counts": True})
    assert found(range(100), play)


def test_retries_without_a_pause_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymdata.http.random.uniform", lambda *_: 0.0)
    assert "was tried again after" in found(range(200), play)


def test_a_rollout_beyond_the_concurrency_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wider(asyncio.Semaphore):
        def __init__(self, value: int) -> None:
            super().__init__(value + 1)

    monkeypatch.setattr(asyncio, "Semaphore", Wider)
    assert "more rollouts at a time" in found(range(100), play)


def test_a_time_limit_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for ever is named."""
    monkeypatch.setattr(Rollout, "remaining_s", lambda self: None)
    assert "nothing can happen any more; waiting: command at" in found(range(200), play)
