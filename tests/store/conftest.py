"""Rows for the store's tests: small, with literal ids, valid in every column."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.store import Run

Row = dict[str, Any]
STARTED = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)


def make_row(index: int = 0, n_turns: int = 2, **changes: Any) -> Row:
    """A rollout of ``n_turns`` model calls, each continuing the one before."""
    encoder = TurnEncoder()
    held: list[int] = [1, 2, 3 + index]
    for turn in range(n_turns):
        generated = [40 + turn, 50 + index, 2]
        log_probs = np.array([-0.1, -1.5 - index, -0.25], np.float32)
        encoder.add(Call(np.array(held, np.int32), np.array(generated, np.int32), log_probs, "stop"))
        held = [*held, *generated, 9, 21]
    row = {
        "rollout_id": f"{index:032x}",
        "run_id": "run",
        "task_id": f"task-{index // 2}",
        "group_id": f"group-{index // 2}",
        "rollout_index": index % 2,
        "policy": "tiny",
        "policy_hash": "abc",
        "policy_version": 0,
        "status": "completed",
        "stop_reason": None,
        "finish_reason": "stop",
        "reward": 0.5,
        "rewards": [{"name": "exact", "value": 0.5}, {"name": "length", "value": None}],
        "temperature": 0.7,
        "n_turns": n_turns,
        "n_breaks": encoder.n_breaks,
        "n_context_tokens": encoder.n_context_tokens,
        "n_generated_tokens": encoder.n_generated_tokens,
        "messages": [{"role": "user", "content": "3 + 4\t?\n"}, {"role": "assistant", "content": "7", "turn": 0}],
        "tools": "[]",
        "task": '{"answer":"7"}',
        "extra": "{}",
        "turns": encoder.turns,
        "started_at": STARTED,
        "duration_s": 0.25,
    }
    return row | changes


@pytest.fixture
def row() -> Callable[..., Row]:
    return make_row


@pytest.fixture
def open_run(tmp_path: Path) -> Callable[..., Run]:
    """Opens the run ``tmp_path/run`` with settings that a test may change."""

    def opener(**changes: Any) -> Run:
        settings: dict[str, Any] = {
            "folder": tmp_path / "run",
            "identity": {"model": "tiny", "temperature": 0.7},
            "extent": {"num_rollouts": 2},
            "operation": {"concurrency": 4},
        }
        settings |= changes
        return Run.open(settings.pop("folder"), **settings)

    return opener


@pytest.fixture
def interrupted(open_run: Callable[..., Run]) -> Callable[..., None]:
    """Opens a run, appends rows, and leaves it as Ctrl-C does: rows journaled, nothing sealed."""

    def interrupt(rows: Iterable[Row], **changes: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt), open_run(**changes) as run:
            for row in rows:
                run.append(row)
            raise KeyboardInterrupt

    return interrupt
