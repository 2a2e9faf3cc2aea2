"""A real ``gymdata collect`` is killed again and again; what it leaves is resumed, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import random
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymdata.store import read_run_json
from tests.collect.saved_rows import rows_of
from tests.kills import DEADLINE_S, fork, kill_at, rows_there, session_members, start
from tests.servers import ending_as_the_policy

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
ENV = f"{ROOT / 'sample_data' / 'calculator.py'}:Calculator"
TASKS, ROLLOUTS = 50, 5
#: The calculator, which at call ``KILL_AT`` kills this process, or with ``KILL`` what has that in its name and is of this
#: session: a watcher in another process comes too late on a busy machine.
DYING = f"""
import contextlib, importlib.util, os, signal
from pathlib import Path

spec = importlib.util.spec_from_file_location("calculator", {str(ROOT / "sample_data" / "calculator.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


class Calculator(module.Calculator):
    calls = 0

    def calculate(self, expression: str) -> str:
        \"\"\"Work out an arithmetic expression.

        Args:
            expression: Whole numbers joined by +, - or *, for example 12*34.
        \"\"\"
        Calculator.calls += 1
        if Calculator.calls == int(os.environ.get("KILL_AT", "0")):
            name = os.environ.get("KILL")
            for entry in Path("/proc").glob("[1-9]*"):
                with contextlib.suppress(OSError):
                    pid = int(entry.name)
                    ours = os.getsid(pid) == os.getsid(0) and name is not None and name in (entry / "cmdline").read_text()
                    if ours or (name is None and pid == os.getpid()):
                        os.kill(pid, signal.SIGKILL)
        return super().calculate(expression)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ending_as_the_policy("--latency", "0.05") as started:
        yield started.url


def dying(folder: Path) -> str:
    (folder / "dying.py").write_text(DYING)
    return f"{folder / 'dying.py'}:Calculator"


def arguments(run: Path, *more: str, env: str = ENV) -> list[str]:
    return [
        *(str(ROOT / "sample_data" / "tasks" / "train.jsonl"), "-o", str(run), "-n", str(TASKS), "-r", str(ROLLOUTS)),
        *("--env", env, "--reward", "numeric", "--max-tokens", "24", "--max-turns", "3", "--seed", "11"),
        *("--run-id", "kill-test", *more),
    ]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20, 30))
def test_kills_lose_and_double_nothing(seed: int, server: str, tmp_path: Path) -> None:
    """After SIGKILLs at random journal lengths, with rollouts in flight, no process is left, and the resumed run's sealed
    rows are those of an uninterrupted one. Every state of the files: ``store/test_crash_states.py``."""
    remote = ["--endpoint", server, "-m", "fake", "--tokenizer", str(POLICY), "--rows-per-file", "83"]
    run, rng = tmp_path / "killed", random.Random(seed)
    for _ in range(6):
        process = fork(arguments(run, *remote, "-c", "5"))
        assert process.pid is not None
        kill_at(process.pid, run, rows_there(run) + rng.randint(1, 20))
        process.join()
        assert process.exitcode == -9
        assert session_members(process.pid) == []
    assert finished(arguments(run, *remote, "-c", "5")) == TASKS * ROLLOUTS
    assert finished(arguments(tmp_path / "whole", *remote, "-c", "100")) == TASKS * ROLLOUTS
    rows = rows_of(run)
    assert len({(r["task_id"], r["rollout_index"]) for r in rows}) == len(rows) == TASKS * ROLLOUTS
    assert rows == rows_of(tmp_path / "whole")
    assert not list((run / "rollouts").glob("part-*.jsonl"))
    assert sum(f["rows"] for f in read_run_json(run)["files"]) == TASKS * ROLLOUTS


@pytest.mark.engine
@pytest.mark.full
def test_kills_with_the_engine_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of a collect that holds vLLM: no engine process outlives it. SIGKILL of vLLM's own processes: exit code 3,
    rows sealed, no attempt counted. The same command completes the run."""
    pytest.importorskip("vllm")
    run = tmp_path / "run"
    words = arguments(run, "-m", str(POLICY), "--max-attempts", "1", "-c", "16", env=dying(tmp_path))
    monkeypatch.setenv("KILL_AT", "30")
    process = start(words)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -9
    _await_gone(process.pid)
    before = rows_there(run)
    monkeypatch.setenv("KILL", "VLLM")
    process = start(words)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, err.decode()
    assert "engine" in err.decode()
    _await_gone(process.pid)
    assert before < len(rows_of(run)) < TASKS * ROLLOUTS
    assert not list((run / "rollouts").glob("part-*.jsonl"))
    monkeypatch.delenv("KILL_AT")
    assert finished(words) == TASKS * ROLLOUTS
    rows = rows_of(run)
    assert len({(r["task_id"], r["rollout_index"]) for r in rows}) == len(rows) == TASKS * ROLLOUTS


def finished(words: list[str]) -> int:
    """The rollouts of a run whose command ends, and leaves no process."""
    process = start([*words, "--json"])
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err.decode()
    _await_gone(process.pid)
    return int(json.loads(out)["rollouts"])


def _await_gone(session: int) -> None:
    """All processes of the session end within a minute."""
    for pid in session_members(session):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([handle], [], [], 60.0)[0], f"process {pid} is still alive"
        finally:
            os.close(handle)
    assert session_members(session) == []
