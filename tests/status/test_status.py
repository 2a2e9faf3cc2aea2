"""``gymdata status`` of runs that are written, that were stopped, and that are elsewhere: figures counted by hand."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gymdata.cli.main import main
from gymdata.collect.run import collect
from gymdata.collect.settings import CollectConfig
from gymdata.errors import DataError, OutsideError, UsageError
from gymdata.status.run import RunStatus, status
from gymdata.store.lock import Lock
from tests.collect.fake_parts import FakeSampler, engine_fault, parts
from tests.rollout_files import rollout, two_turns, write_run
from tests.servers import serving

TASKS = [{"task_id": f"t{n}", "prompt": f"{n}", "answer": "1"} for n in range(5)]


def collected(run: Path, sampler: FakeSampler, **settings: Any) -> None:
    config = CollectConfig.of({"tasks": "-", "output": run, "seed": 3, **settings}, "test")
    collect(TASKS, config=config, parts=parts(sampler))


def only(path: Path) -> RunStatus:
    (found,) = status(path).runs
    return found


def test_a_run_that_is_written_shows_rollouts_speed_and_time_left(tmp_path: Path) -> None:
    """Four of ten are there while the fifth waits: what is left takes as long as the speed says."""
    four, go_on = threading.Event(), threading.Event()

    async def wait_for_the_fifth(_: Any) -> None:
        if len(sampler.requests) > 4:
            four.set()
            import asyncio

            await asyncio.to_thread(go_on.wait)

    sampler = FakeSampler(before=wait_for_the_fifth)
    work = threading.Thread(
        target=collected, args=(tmp_path / "run", sampler), kwargs={"num_rollouts": 2, "concurrency": 1}
    )
    work.start()
    assert four.wait(60)
    running = only(tmp_path / "run")
    go_on.set()
    work.join()
    assert (running.state, running.unit, running.done, running.wanted) == ("being written", "rollouts", 4, 10)
    assert running.per_minute is not None
    assert running.eta_s == pytest.approx(6 / running.per_minute * 60)
    done = only(tmp_path / "run")
    assert (done.state, done.done, done.eta_s) == ("complete", 10, None)


def test_failed_attempts_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the run that has rollouts pending ends with exit code 1."""

    async def fails(request: Any) -> None:
        if b"4" in bytes(i for i in request.prompt_token_ids if i < 256):
            raise engine_fault()

    collected(tmp_path / "run", FakeSampler(before=fails), max_attempts=5)
    assert (only(tmp_path / "run").failures, only(tmp_path / "run").done) == ({"engine": 1}, 4)
    assert main(["status", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "rollouts pending" in said
    assert "engine 1" in said
    assert "4 of 5 (80%)" in said


def test_a_folder_shows_what_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Complete runs are left out; a folder without others says so, and a path that does not exist is named."""
    write_run(tmp_path / "runs" / "done", [rollout("t", 0, 1.0, two_turns(5, 40))])
    with pytest.raises(DataError, match="nowhere"):
        status(tmp_path / "nowhere")
    assert status(tmp_path / "runs").runs == []
    assert main(["status", str(tmp_path / "runs")]) == 0
    assert "is complete" in capsys.readouterr().out

    async def fails(_: Any) -> None:
        raise engine_fault()

    collected(tmp_path / "runs" / "left", FakeSampler(before=fails))
    assert [Path(run.path).name for run in status(tmp_path / "runs").runs] == ["left"]


def test_a_training_shows_steps_and_its_newest_figures(tmp_path: Path) -> None:
    """Of 2 epochs, step 3 is at epoch 0.5: 12 steps, at 10 s each."""
    rows = [{"step": n, "epoch": n / 6, "elapsed_s": 10.0 * n, "loss": 1.0 / n, "tokens_per_s": 7.0} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "torn')
    facts = {"stage": "train-sft", "status": "running", "settings": {"num_train_epochs": 2}, "files": []}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    lock = Lock(tmp_path)
    running = only(tmp_path)
    lock.release()
    assert (running.state, running.done, running.wanted) == ("being written", 3, 12)
    assert (running.per_minute, running.eta_s, running.figures) == (6.0, 90.0, {"loss": pytest.approx(1 / 3)})
    assert only(tmp_path).state == "interrupted"


@pytest.mark.parametrize(
    ("trainer", "left"), [({"max_steps": 20}, 100.0), ({"num_train_epochs": 2}, 100.0), ({}, None)], ids=str
)
def test_a_training_that_runs_is_as_long_as_its_command_says(
    tmp_path: Path, trainer: dict[str, int], left: float | None
) -> None:
    """By steps, or by epochs; with neither how long it takes is not known before it ends."""
    row = {"step": 10, "epoch": 1.0, "elapsed_s": 100.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    facts = {"stage": "train-sft", "status": "running", "config": {"trainer": trainer}, "files": []}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    lock = Lock(tmp_path)
    running = only(tmp_path)
    lock.release()
    assert (running.wanted, running.eta_s) == (left and 20, left)


@pytest.mark.parametrize(
    ("times", "speed"),
    [({10: 100}, 6.0), ({100: 1000, 200: 2000, 201: 10, 202: 20}, 6.0)],
    ids=["each tenth", "resumed"],
)
def test_the_speed_of_a_training_is_that_of_its_present_process(
    tmp_path: Path, times: dict[int, float], speed: float
) -> None:
    """Step → seconds since its process began: steps that are not logged count, and those before a resume do not."""
    rows = [{"step": step, "epoch": step / 100, "elapsed_s": seconds} for step, seconds in times.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps({"stage": "train-sft", "status": "running", "files": []}))
    assert only(tmp_path).per_minute == speed


def test_a_run_of_another_machine_is_not_called_interrupted(tmp_path: Path) -> None:
    """Its lock cannot be seen from here, but names the machine that holds it."""
    attempts = [{"started_at": "2026-11-01T00:00:00+00:00", "ended_at": None}]
    facts = {"stage": "collect", "attempts": attempts, "files": []}
    (tmp_path / "run.json").write_text(json.dumps({**facts, "schemas": {"rollouts": 1}}))
    (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-11-01T00:00:00+00:00"}))
    assert (only(tmp_path).state, only(tmp_path).is_running) == ("on elsewhere", True)


def test_a_finetuning_run_shows_its_epoch_and_stage(tmp_path: Path) -> None:
    """And the output that it is writing."""
    stages = {"1": {"collect": {"state": "completed"}, "train": {"state": "running"}}}
    state = {"run_id": "r", "status": "running", "running": {"epoch": 1, "stage": "train"}, "epochs": stages}
    (tmp_path / "state.json").write_text(json.dumps(state))
    lock = Lock(tmp_path)
    running = only(tmp_path)
    lock.release()
    assert (running.kind, running.stage, running.done) == ("finetune", "epoch 1, train", 1)
    assert only(tmp_path).state == "interrupted"


def test_a_webhook_is_told_that_a_run_has_ended_or_stalls(tmp_path: Path) -> None:
    """It waits for the writer, and posts what status says, once, with a line for people; of a run that is being written and
    makes no progress, too."""
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, two_turns(20, 40))])
    lock, posted = Lock(run), Posted()
    with posted.server() as url:
        status(run, notify=url, stalled_after=0.0)
        waiting = threading.Thread(target=status, args=(run,), kwargs={"notify": url, "every": 0.001})
        waiting.start()
        assert [body["event"] for body in posted.bodies] == ["stalled"]
        lock.release()
        waiting.join(60)
    _, body = posted.bodies
    assert body["event"] == "ended"
    assert body["runs"][0]["done"] == 1
    assert "has ended" in body["text"]


def test_a_webhook_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its URL without the query, which may be a key, after several tries."""
    monkeypatch.setattr("gymdata.status.run._PAUSES_S", (0.0, 0.0))
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, two_turns(20, 40))])
    posted = Posted(status=500)
    with posted.server() as url, pytest.raises(OutsideError, match=r"webhook: .*500") as caught:
        status(run, notify=f"{url}/x?key=topsecret1")
    assert len(posted.bodies) == 3
    assert "topsecret1" not in str(caught.value)
    with pytest.raises(UsageError, match="--notify"):
        status(run, notify="not a url")


class Posted:
    """A webhook."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.bodies = status, list[dict[str, Any]]()

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.Response(status=self.status)

    def server(self) -> contextlib.AbstractContextManager[str]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.answer)
        return serving(app)
