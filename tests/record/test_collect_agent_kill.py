"""A real ``gymdata collect --agent`` is killed while its agents run, and started again."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.journal import read_failure_file
from tests.faulty_server import Settings, build
from tests.kills import kill_at, start, wait_for_rows
from tests.record.recorded_agent import ASK
from tests.servers import serving

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
#: Asks twice, so that a kill finds sessions that are open.
TWICE = (
    ASK.partition('open("answer')[0]
    + "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))"
)


@pytest.fixture
def engine() -> Iterator[str]:
    with serving(build(Settings(latency=0.05, vocab=51))) as url:
        yield url


def arguments(run: Path, engine: str) -> list[str]:
    agent = f"{shlex.quote(sys.executable)} -c {shlex.quote(TWICE)} {{prompt}} 0"
    words = [str(ROOT / "sample_data" / "tasks" / "train.jsonl"), "-o", str(run), "-n", "6", "-r", "2", "--seed", "3"]
    words += ["--endpoint", engine, "-m", "fake", "--tokenizer", str(POLICY), "--run-id", "kill-test"]
    return [*words, "--agent", agent, "--reward", "numeric", "--max-tokens", "8"]


def rows_of(run: Path) -> dict[str, Any]:
    """What was sampled, by rollout."""
    return {
        row["rollout_id"]: [list(turn["generation_token_ids"]) for turn in row["turns"]]
        for row in read_table(run, ROLLOUTS).to_pylist()
    }


@pytest.mark.full
@pytest.mark.parametrize("kills", [1, 8])
def test_a_killed_run_is_resumed(engine: str, tmp_path: Path, kills: int) -> None:
    """The same command gives the rows of a run that nobody killed; attempts that the kill ended are put aside, uncounted."""
    run = tmp_path / "run"
    for kill in range(kills):
        process = start(arguments(run, engine))
        kill_at(process.pid, run, 1 + kill * 10 // kills)
        process.communicate()
    ended = start(arguments(run, engine))
    out, err = ended.communicate()
    assert ended.returncode == 0, (out + err).decode()
    whole = start(arguments(tmp_path / "whole", engine))
    whole.communicate()
    assert rows_of(run) == rows_of(tmp_path / "whole")
    assert len(rows_of(run)) == 12
    assert validate(run).ok
    faults = read_failure_file(run / "failures.jsonl") if (run / "failures.jsonl").exists() else []
    assert {(f["kind"], f["counts"]) for f in faults} <= {("agent", False)}
    assert not list(run.glob("sessions/*"))


@pytest.mark.full
def test_ctrl_c_lets_agents_end(engine: str, tmp_path: Path) -> None:
    """The first signal starts no other agent; what runs is written, and the same command does the rest."""
    run = tmp_path / "run"
    process = start(arguments(run, engine))
    wait_for_rows(process, run, 1, "python")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, (out + err).decode()
    assert 1 <= len(rows_of(run)) < 12
    assert json.loads((run / "run.json").read_text())["counts"]["pending"] == 12 - len(rows_of(run))
    resumed = start(arguments(run, engine))
    resumed.communicate()
    assert len(rows_of(run)) == 12
