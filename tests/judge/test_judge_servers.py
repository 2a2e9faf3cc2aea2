"""Several real judge servers behind one command: they share the work, serve the same model, and may go and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.judge.run import JudgeSummary
from gymdata.commands.judge.run import judge as run_judge
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.schema import COMPARISONS, SCORES
from gymdata.store import read_run_json, read_table
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, two_turns, write_run
from tests.servers import JUDGE, ServerProcess, Watcher, server_processes

#: Two answers at a time, 0.05 s each.
PACED = ("--latency", "0.05", "--slots", "2")
TABLES = (("comparisons", COMPARISONS), ("scores", SCORES))


@pytest.fixture
def up() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; at the end all are gone."""
    with server_processes(JUDGE) as start:
        yield start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten groups of four: 120 comparisons in both positions."""
    rows = [
        rollout(f"t{task}", n, 0.0, two_turns(1, 40 + n), text=f"q={1 + (task + n) % 5} t{task}r{n}")
        for task in range(10)
        for n in range(4)
    ]
    return write_run(tmp_path / "run", rows)


def judged(run: Path, endpoint: Any, name: str = "judge", **settings: Any) -> JudgeSummary:
    given = {"model": "judge", "name": name, "retry_pause": 0.01, "concurrency": 16}
    return run_judge(path=str(run), endpoint=endpoint, **{**given, **settings})


def test_a_server_of_another_model_gives_no_verdict(up: Callable[..., ServerProcess], run: Path) -> None:
    """It answers that it has no such model: it is named, and the other judges everything."""
    a, other, watch = up(), up("--name", "other"), Watcher()
    summary = judged(run, [a.url, other.url], progress=watch)
    assert summary.comparisons == {"judged": 120, "unparsed": 0, "refused": 0, "failed": 0}
    assert any(text.startswith(f"{other.url} gets no requests for 30 s: ") and "404" in text for text in watch.said)
    assert read_run_json(run / "judge-judge")["engine"]["servers"] == [a.url, other.url]


def test_all_servers_lost_are_the_judge_s_fault_and_repaid_is_nothing(
    up: Callable[..., ServerProcess], run: Path
) -> None:
    """Exit 3 naming the judge when none came back in time; no verdict was made of it, and a rerun judges only the rest."""
    a, b = up(*PACED), up(*PACED)

    def both() -> None:
        a.kill()
        b.kill()

    watch = Watcher((20, both))
    with pytest.raises(OutsideError, match="none of 2 servers can be reached") as caught:
        judged(run, [a.url, b.url], progress=watch, wait_for_server=0.5)
    assert (caught.value.system, caught.value.exit_code) == ("judge", 3)
    assert "no server can be reached, retrying for 0.5 s (wait_for_server=)" in watch.said
    assert not (run / "judge-judge" / "comparisons.parquet").exists()
    b.start()
    summary = judged(run, b.url)
    assert summary.comparisons["judged"] == 120
    assert summary.cached >= 20
    assert summary.asked + summary.cached == 120


def test_what_one_server_refuses_is_no_verdict_of_another(run: Path) -> None:
    """A comparison that a server answers with garbage goes to the other; one that is refused has no numbers."""
    bad, good = Behaviour(always="garbage"), Behaviour(poisoned={"q=1 t0r0": "400"})
    with judge_server(bad) as a, judge_server(good) as b:
        summary = judged(run, [a, b], constrain="off", retries=1)
        asked_bad = len(bad.requests)
    assert summary.comparisons == {"judged": 114, "unparsed": 0, "refused": 6, "failed": 0}
    assert asked_bad > 0
    refused = [row for row in read_table(run / "judge-judge", COMPARISONS).to_pylist() if row["status"] == "refused"]
    assert {row["score_1"] for row in refused} == {None}


def test_a_served_judge_is_named(run: Path) -> None:
    """Its name is that of the folder and of its verdicts: an endpoint alone is not guessed at."""
    with pytest.raises(UsageError, match="without --model"):
        judged(run, "http://127.0.0.1:9", model=None)
