"""One output as ``gymdata ls`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymdata.remote.places import is_url

#: Rows that an import rejected, in a file beside its output.
_REJECTED = "rejected.jsonl"


@dataclass(frozen=True, slots=True)
class Output:
    """An output as its run.json describes it. ``path`` and ``parents``: below the folder that was listed, where they
    are; ``rows``: of a run that is open, with those of its journal; ``bytes``: on disk; ``changed``: ISO 8601, UTC;
    ``state``: complete, being written, interrupted, rollouts pending, parents missing, parents changed
    (its run was overwritten), or damaged."""

    path: str
    kind: str
    rows: int | None
    bytes: int
    changed: str
    parents: tuple[str, ...]
    state: str


def row_counts(facts: Mapping[str, Any]) -> list[int]:
    """The row counts of the output's files, from its run.json; files without rows of the output are left out."""
    entries = facts.get("files") or []
    return [one["rows"] for one in entries if one.get("rows") is not None and one.get("path") != _REJECTED]


def parent_path(run_json: Path, path: str) -> Path:
    """The ``path`` of a parent that ``run_json`` names: where it leads to from here, or from there."""
    named = Path(path)
    return named if named.is_absolute() or is_url(path) or named.exists() else run_json.parent / named
