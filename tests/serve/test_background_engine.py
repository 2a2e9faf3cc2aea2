"""``gymdata serve --background`` with a real engine: later commands sample from it, and from their own when it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from gymdata.cli.main import main
from gymdata.engines.servers.background import BackgroundServer, background_servers
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_run_json, read_table
from tests.engine_fixtures import server_environment

pytestmark = [pytest.mark.engine, pytest.mark.full]
TASKS = "sample_data/tasks/train.jsonl"
SAMPLING = ["-n", "2", "-r", "2", "--max-tokens", "8", "--seed", "1", "--run-id", "x", "--temperature", "0"]


@pytest.fixture(scope="module")
def server(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server_environment().items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert main(["serve", policy, "--background"]) == 0
        (server,) = background_servers()
        try:
            yield server
        finally:
            server.stop()


def test_rows_and_identity_are_those_without_it(
    server: BackgroundServer, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``collect -m`` samples from the server what ``--endpoint`` samples, as the run that an engine of its own makes: when
    the server is killed the same command resumes it."""
    words = ["collect", TASKS, "-m", policy, *SAMPLING]
    assert main([*words, "--endpoint", server.url, "-o", str(tmp_path / "url")]) == 0
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "run")]) == 0
    assert f"sampling from {server.url}" in capsys.readouterr().err
    assert main(["serve", policy, "--background"]) == 0
    assert f"{server.url} already (process {server.pid}" in capsys.readouterr().err
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    processes[0].kill()
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    more = [word if word != "2" else "3" for word in SAMPLING]
    assert main(["collect", TASKS, "-m", policy, *more, "-o", str(tmp_path / "run")]) == 0
    assert f"starting vLLM with {policy}" in capsys.readouterr().err
    assert main(["serve", policy, "--stop"]) == 2
    assert "--background starts one" in capsys.readouterr().err
    run = read_run_json(tmp_path / "run")
    assert not str(run["identity"]["policy_hash"]).startswith("served:")
    columns = ["task_id", "rollout_index", "turns"]
    by_url, turns = (
        {
            (row["task_id"], row["rollout_index"]): row["turns"]
            for row in read_table(folder, ROLLOUTS, columns).to_pylist()
        }
        for folder in (tmp_path / "url", tmp_path / "run")
    )
    assert (len(by_url), len(turns)) == (4, 9)
    assert {rollout: turns[rollout] for rollout in by_url} == by_url
