"""``gymdata serve-genrm`` killed in each state that the files of its folder pass through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import kills
from tests.judge.serve.conftest import Server, verify_all, verify_body
from tests.judge_server import Behaviour


def held(folder: Path) -> dict[str, Any]:
    """What came of each comparison, each there once; and the names of the files."""
    rows = [json.loads(line) for line in (folder / "comparisons.jsonl").read_text().splitlines()]
    assert len({row["comparison_id"] for row in rows}) == len(rows)
    shown = ("group_id", "score_1", "score_2", "ranking", "status")
    # Half a line that a kill left is kept aside, as .torn.
    names = sorted(path.name for path in folder.rglob("*") if path.suffix != ".torn")
    return {"rows": sorted(json.dumps({k: row.get(k) for k in shown}) for row in rows), "names": names}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["lines", "states"])
def test_a_server_that_was_killed_anywhere_goes_on(
    every: bool, judge: tuple[Behaviour, str], serve: Callable[..., Server], tmp_path: Path
) -> None:
    """Killed in each state of its folder while it judges two cohorts, or once before each line that changes a file: started
    again and sent the same in another order, it gives the same rewards, has each comparison once, asks for none that it had,
    and leaves no file more."""
    behaviour, _ = judge
    folder, flags = tmp_path / "online", ("--num-rollouts-per-prompt", "2", "-c", "1")
    cohorts = [[verify_body(f"q={1 + n + g} {g}", group_id=f"g{g}", rollout_id=n) for n in range(2)] for g in range(2)]

    def whole(copies: Path | None = None, order: int = 1) -> tuple[list[list[float]], dict[str, Any]]:
        server = serve(*flags, folder=folder, copies=copies)
        rewards = [[body["reward"] for _, body in verify_all(server, bodies[::order])][::order] for bodies in cohorts]
        assert server.stop() in (0, 130)
        return rewards, held(folder)

    expected = whole(tmp_path / "copies")
    asked = len(behaviour.requests)
    assert whole() == expected
    assert len(behaviour.requests) == asked
    lines = (tmp_path / "copies" / "order").read_text().splitlines()
    assert len(lines) > 20
    by_line = {kills.line_of(what): name for name, _, what in (line.partition(" ") for line in reversed(lines))}
    for name in [line.split()[0] for line in lines] if every else by_line.values():
        shutil.rmtree(folder)
        files = tmp_path / "copies" / name / "files"
        if files.exists():
            shutil.copytree(files, folder)
        journal = folder / "verdicts.journal"
        had = journal.read_bytes().count(b"\n") if journal.exists() else 0
        before = len(behaviour.requests)
        assert whole(order=-1) == expected, name
        assert len(behaviour.requests) - before == asked - had
