"""``gymdata serve-genrm`` is killed, or loses power: what was judged and paid for is there once."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from gymdata.commands.judge.verdict_cache import VerdictCache, VerdictLog
from gymdata.store.journal import scan
from tests.crash_states import recording, wrong_states
from tests.judge.serve.conftest import Server, verify_all, verify_body
from tests.judge_server import Behaviour

VERDICTS = [{f"key-{n}": {"score": float(n)}, f"other-{n}": {"score": 0.5}} for n in range(3)]


def faults_of(folder: Path, promises: list[Any]) -> str | None:
    """What is wrong for a server that goes on with these files; None if nothing. What it judges again, it adds again."""
    folder.mkdir(exist_ok=True)
    with (
        closing(VerdictCache(folder / "verdicts.journal")) as verdicts,
        closing(VerdictLog(folder / "comparisons.jsonl", "comparison_id")) as comparisons,
    ):
        for number, records in enumerate(VERDICTS):
            found = [verdicts.get(key) for key in records]
            if found != list(records.values()) and (found != [None, None] or number in promises):
                return f"of {records} it knows {found}"
            verdicts.put(records)
            comparisons.add({"comparison_id": f"c{number}", "score_1": float(number)})
    bodies = [line.body for line in scan(folder / "comparisons.jsonl")]
    ids = sorted(json.loads(body)["comparison_id"] for body in bodies if body is not None)
    return None if ids == ["c0", "c1", "c2"] else f"comparisons {ids}"


def test_a_power_cut_leaves_each_verdict_whole_or_unknown(tmp_path: Path) -> None:
    """Records that were put together are known together; each comparison is there once; after the files were closed, all."""
    folder = tmp_path / "work" / "online"
    folder.mkdir(parents=True)
    with recording(folder.parent) as made:
        verdicts = VerdictCache(folder / "verdicts.journal")
        comparisons = VerdictLog(folder / "comparisons.jsonl", "comparison_id")
        for number, records in enumerate(VERDICTS):
            verdicts.put(records)
            comparisons.add({"comparison_id": f"c{number}", "score_1": float(number)})
        verdicts.close()
        comparisons.close()
    tried, wrong = wrong_states(
        made, tmp_path / "left", lambda left, promises: faults_of(left / "online", promises), 64
    )
    assert wrong == []
    assert tried > 50


def test_a_server_that_was_killed_goes_on(
    judge: tuple[Behaviour, str], serve: Callable[..., Server], tmp_path: Path
) -> None:
    """Killed after it judged one of two cohorts and started again, it gives the same rewards for all in another order, asks
    for no comparison that it had, and has each once."""
    behaviour, _ = judge
    folder, flags = tmp_path / "online", ("--num-rollouts-per-prompt", "2", "-c", "1")
    cohorts = [[verify_body(f"q={1 + n + g} {g}", group_id=f"g{g}", rollout_id=n) for n in range(2)] for g in range(2)]

    def rewards(server: Server, bodies: list[Any]) -> list[float]:
        return [body["reward"] for _, body in verify_all(server, bodies)]

    first = serve(*flags, folder=folder)
    paid = rewards(first, cohorts[0])
    asked = len(behaviour.requests)
    first.kill()
    second = serve(*flags, folder=folder)
    assert rewards(second, cohorts[0][::-1]) == paid[::-1]
    assert len(behaviour.requests) == asked
    rewards(second, cohorts[1])
    assert len(behaviour.requests) == 2 * asked
    assert second.stop() in (0, 130)
    rows = [json.loads(line) for line in (folder / "comparisons.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["comparison_id"] for row in rows}) == 2 * asked
