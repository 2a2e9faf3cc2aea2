"""A run with scores."""

from __future__ import annotations

from pathlib import Path

from tests.rollout_files import rollout, two_turns, write_run


def scored_run(folder: Path, tasks: int = 5) -> Path:
    """Four rollouts a task with rewards 0, 1, 0.5 and none."""
    rewards = (0.0, 1.0, 0.5, None)
    return write_run(
        folder, [rollout(f"t{t}", i, r, two_turns(5 + t, 40 + i)) for t in range(tasks) for i, r in enumerate(rewards)]
    )
