"""How many ids the policy of a run can read and sample, as its run.json says it."""

from __future__ import annotations

from pathlib import Path

from gymdata.store.paths import find_run_json, read_facts


def vocabulary(path: str | Path) -> int | None:
    """One above the largest id of the model behind a run folder or a file in it; None where nothing says it."""
    found = find_run_json(path)
    engine = read_facts(found).get("engine") if found is not None else None
    size = engine.get("vocab_size") if isinstance(engine, dict) else None
    return size if isinstance(size, int) and size > 0 else None
