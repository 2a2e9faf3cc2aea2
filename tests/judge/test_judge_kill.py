"""``gymdata judge`` killed at random moments: what was judged is not asked again, and the end is the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.judge.run import judge as run_judge
from gymdata.rollouts.schema import COMPARISONS, SCORES
from gymdata.store import read_table
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, two_turns, write_run

IN_FLIGHT = 4


def start(run: Path, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gymdata.cli", "judge", str(run), "--endpoint", url, "-m", "judge"]
    return subprocess.Popen(
        [*command, "-c", str(IN_FLIGHT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}
    )


def wait_for(behaviour: Behaviour, requests: int, process: subprocess.Popen[bytes]) -> None:
    while len(behaviour.requests) < requests and process.poll() is None:
        try:
            process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue


@pytest.mark.full
def test_kills_and_interrupts_repay_only_what_was_in_flight(tmp_path):
    """Killed four times and interrupted once; each pays again for at most what was in flight then."""
    rows = [
        rollout(f"t{task}", n, 0.0, two_turns(1, 40 + n), text=f"q={1 + (task + n) % 5} t{task}r{n}")
        for task in range(8)
        for n in range(4)
    ]
    run, draw = write_run(tmp_path / "run", rows), random.Random(0)
    behaviour = Behaviour(latency=0.01)
    with judge_server(behaviour) as url:
        ends = [signal.SIGKILL] * 2 + [signal.SIGINT] + [signal.SIGKILL] * 2
        for end in ends:
            process = start(run, url)
            wait_for(behaviour, len(behaviour.requests) + draw.randint(3, 15), process)
            process.send_signal(end)
            code = process.wait()
            assert code == (130 if end == signal.SIGINT else -signal.SIGKILL)
        assert not (run / "judge-judge" / "comparisons.parquet").exists()
        before = len(behaviour.requests)
        summary = run_judge(path=str(run), endpoint=url, model="judge")
        assert summary.comparisons["judged"] == 96
        assert summary.asked == len(behaviour.requests) - before
        assert summary.asked + summary.cached == 96
        # No comparison was asked for more often than it was interrupted.
        assert len(behaviour.requests) <= 96 + IN_FLIGHT * len(ends)
        elsewhere = run_judge(path=str(run), endpoint=url, model="judge", output=tmp_path / "whole")
    assert elsewhere.asked == 96
    columns = [c for c in COMPARISONS.schema.names if c != "usage"]
    once, again = (read_table(f, COMPARISONS, columns) for f in (tmp_path / "whole", run / "judge-judge"))
    assert once.equals(again)
    values = [read_table(f, SCORES)["value"].to_pylist() for f in (tmp_path / "whole", run / "judge-judge")]
    assert values[0] == values[1]
