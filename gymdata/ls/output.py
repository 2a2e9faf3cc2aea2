"""What ``gymdata ls`` says of one output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Output:
    """What one run.json describes. ``path`` and ``parents``: below the folder that was listed, where they are; ``rows``: of
    a run that is open, with those of its journal; ``bytes``: on disk; ``changed``: ISO 8601, UTC; ``state``: complete,
    being written, interrupted, rollouts pending, parents missing, or damaged."""

    path: str
    kind: str
    rows: int | None
    bytes: int
    changed: str
    parents: tuple[str, ...]
    state: str
