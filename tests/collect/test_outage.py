"""A real server that goes away while rollouts are collected from it: waited for, named once, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import OutsideError
from gymdata.store import read_run_json
from tests.collect.saved_rows import failures_of, rows_of
from tests.faulty_server import Settings
from tests.servers import ServerProcess, Watcher

pytestmark = pytest.mark.torch

TASKS = 40
Serve = Callable[[Settings], str]


@pytest.fixture
def process(up: Callable[..., ServerProcess]) -> ServerProcess:
    return up("--latency", "0.02")


def watching(process: ServerProcess, then: Callable[[], None] = lambda: None) -> Watcher:
    """Kills the server when ten rollouts are there, and does ``then`` when its loss is announced."""
    watcher = Watcher((10, process.kill))
    watcher.on("server unreachable", then)
    return watcher


@pytest.fixture
def settings(tasks: Any, tmp_path: Path, served: dict[str, Any]) -> dict[str, Any]:
    return {"tasks": str(tasks(TASKS)), "output": tmp_path / "run", **served, "num_rollouts": 4, "concurrency": 4}


def test_a_server_that_comes_back_is_waited_for(process: ServerProcess, settings: dict[str, Any]) -> None:
    """One line says that it is gone and for how long it is waited for, one that it is back; every rollout is there. ls
    says it meanwhile instead of a time left, run.json keeps it, and the speed leaves it out."""
    seen = []

    def comes_back() -> None:
        seen.append(gymdata.ls(settings["output"]).outputs[0])
        process.start()

    watcher = watching(process, comes_back)
    summary = gymdata.collect(endpoint=process.url, progress=watcher, **settings)
    assert watcher.then == []
    assert (summary.rollouts, summary.pending, summary.exit_code) == (4 * TASKS, 0, 0)
    gone, back = (text for text in watcher.said if "reachable" in text)
    assert gone == "server unreachable, retrying for 10 min (wait_for_server=)"
    assert back.startswith("server reachable again after ")
    assert (seen[0].state, seen[0].progress.eta_s, seen[0].progress.away_s is not None) == ("being written", None, True)
    (outage,) = read_run_json(settings["output"])["attempts"][-1]["outages"]
    assert summary.away_s == pytest.approx(outage["seconds"], abs=0.1)
    assert gymdata.ls(settings["output"]).outputs[0].progress is None


@pytest.mark.full
def test_a_dying_engine_behind_a_server_costs_no_attempt(server: Serve, settings: dict[str, Any]) -> None:
    """While an engine goes down vLLM's API answers that it is dead, between broken and good answers: that is the outage
    itself. It is announced once, and once when the server is back; every rollout is there and none has a failed attempt."""
    at = Settings(latency=0.02)

    def dies() -> None:
        at.fail_first, at.mode = 12, "dead"

    watcher = Watcher((10, dies))
    summary = gymdata.collect(endpoint=server(at), progress=watcher, max_attempts=1, retries=0, **settings)
    assert (summary.rollouts, summary.pending, summary.failures, summary.exit_code) == (4 * TASKS, 0, 0, 0)
    assert failures_of(settings["output"]) == []
    gone, back = (text for text in watcher.said if "reachable" in text)
    assert gone.startswith("server unreachable")
    assert back.startswith("server reachable again")


@pytest.mark.full
def test_an_engine_that_stays_dead_ends_the_run_and_costs_no_attempt(server: Serve, settings: dict[str, Any]) -> None:
    """Exit 3 after the wait; what failed in flight does not count, and is no failed attempt of the bar."""
    at, counted = Settings(latency=0.02), dict[str, float]()

    class Counting(Watcher):
        def update(self, **counts: float) -> None:
            counted.update(counts)
            super().update(**counts)

    watcher = Counting((10, lambda: setattr(at, "mode", "dead")))
    with pytest.raises(OutsideError, match="its engine died") as caught:
        gymdata.collect(endpoint=server(at), progress=watcher, wait_for_server=0.5, max_attempts=1, **settings)
    assert caught.value.exit_code == 3
    assert not any(failure["counts"] for failure in failures_of(settings["output"]))
    assert (counted["attempts"], counted["given_up"]) == (0, 0)
    assert [text for text in watcher.said if "turn" in text] == []


def test_a_server_that_stays_away_ends_the_run_and_loses_nothing(
    process: ServerProcess, settings: dict[str, Any]
) -> None:
    """Exit 3 with how many rollouts are safe; the same command makes the others when the server is up."""
    watcher = watching(process)
    with pytest.raises(OutsideError, match="cannot be reached") as caught:
        gymdata.collect(endpoint=process.url, progress=watcher, wait_for_server=0.5, **settings)
    there = rows_of(settings["output"])
    assert caught.value.exit_code == 3
    assert caught.value.hint == f"{len(there):,} rollouts are safe; rerun the same command to resume"
    assert 10 <= len(there) < 4 * TASKS
    assert all(not failure["counts"] for failure in failures_of(settings["output"]))
    assert watcher.said.count("server unreachable, retrying for 0.5 s (wait_for_server=)") == 1
    process.start()
    summary = gymdata.collect(endpoint=process.url, wait_for_server=0.5, **settings)
    assert (summary.rollouts, summary.new_rollouts) == (4 * TASKS, 4 * TASKS - len(there))


def test_a_time_limit_during_an_outage_is_no_truncated_rollout(
    process: ServerProcess, settings: dict[str, Any]
) -> None:
    """Rollouts whose time passes while nobody answers are failed attempts of the engine, never answers that were cut."""
    limits = {"wait_for_server": 3.0, "time_limit": 1.0, "max_attempts": 1}
    with pytest.raises(OutsideError):
        gymdata.collect(endpoint=process.url, progress=watching(process), **limits, **settings)
    assert {row["stop_reason"] for row in rows_of(settings["output"])} <= {None, "max_tokens", "stop"}
    assert any("unreachable when the 1 s limit passed" in f["message"] for f in failures_of(settings["output"]))


def test_a_server_that_is_away_is_named_and_not_the_tokenizer(
    tasks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without a model's name, which nobody can know to be served."""
    words = ["collect", str(tasks(2)), "--endpoint", "http://127.0.0.1:9", "-o", str(tmp_path / "run")]
    for more in ([], ["-m", "wrongname"]):
        assert main([*words, *more]) == 3
        assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_the_server_serves_is_named_where_something_else_was_meant(
    server: Serve, tasks: Any, tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that it does not serve, with and without a tokenizer: what is wrong is the name, and nothing else is advised.
    HOST:PORT is a URL. The server names its model; where its folder is not here, --tokenizer is what is missing."""
    url = server(Settings())
    words = ["collect", str(tasks(2)), "--endpoint", url.removeprefix("http://"), "--max-tokens", "4"]
    words += ["-o", str(tmp_path / "run")]
    for name, more in (("wrongname", []), ("wrongname", ["--tokenizer", policy]), (policy, [])):
        assert main([*words, "-m", name, *more]) == 2
        assert f"{url} serves fake, not {name}" in capsys.readouterr().err
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "'fake'" in error
    assert "--tokenizer" in error
    assert not (tmp_path / "run").exists()
    for more in (["-m", "fake"], []):
        assert main([*words, *more, "--tokenizer", policy, "--overwrite"]) == 0
        assert {row["policy"] for row in rows_of(tmp_path / "run")} == {"fake"}
