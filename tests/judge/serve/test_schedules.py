"""What the compare server keeps to in thousands of schedules: see ``played`` for what is drawn and what is checked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gymdata.commands.judge.pairwise import Comparison
from gymdata.commands.judge.serve.group_judge import GroupJudge, Outcome
from gymdata.commands.judge.verdict_cache import VerdictCache
from tests.judge.serve.played import play
from tests.seeded_loop import found, play_all

SCHEDULES = 800


@pytest.mark.matrix("0")
@pytest.mark.parametrize("block", range(25))
def test_every_member_is_answered_with_its_own_reward_or_a_reason(block: int) -> None:
    """Whoever is late, lost, sent twice or too many, goes away and comes again, and whatever is judged, stopped or killed;
    no verdict is paid for twice, and no member judged after it had its reward."""
    play_all(range(block * SCHEDULES, (block + 1) * SCHEDULES), play)


def test_a_member_that_is_paid_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerdictCache, "get", lambda self, key: None)
    assert "twice" in found(range(200), play)


def test_a_caller_that_takes_its_cohort_along_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "shield", lambda future: future)
    assert found(range(200), play)


def test_a_reward_of_another_member_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = GroupJudge.judge

    async def turned(self: Any, comparison: Comparison) -> Outcome:
        outcome = await judged(self, comparison)
        return Outcome(outcome.rewards[::-1], outcome.judged, outcome.metrics)

    monkeypatch.setattr(GroupJudge, "judge", turned)
    assert " got " in found(range(200), play)
