"""``gymdata ls`` of runs that are written, that were stopped, and that are elsewhere: figures counted by hand."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.commands.collect.run import collect
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.ls.run import Output, ls
from gymdata.commands.ls.running import RunProgress, find_outages
from gymdata.store.lock import Lock
from gymdata.store.reading import DataWarning
from tests.collect.fake_parts import FakeSampler, engine_fault, parts
from tests.rollout_files import rollout, two_turns, write_run

TASKS = [{"task_id": f"t{n}", "prompt": f"{n}", "answer": "1"} for n in range(5)]


def collected(run: Path, sampler: FakeSampler, **settings: Any) -> None:
    config = CollectConfig.of({"tasks": "-", "output": run, "seed": 3, **settings}, "test")
    collect(TASKS, config=config, parts=parts(sampler))


def only(path: Path) -> Output:
    (found,) = ls(path).outputs
    return found


def progress(output: Output) -> RunProgress:
    assert output.progress is not None
    return output.progress


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
    shown = progress(running)
    assert (running.state, shown.unit, shown.done, shown.wanted) == ("being written", "rollouts", 4, 10)
    assert shown.per_minute is not None
    assert shown.eta_s == pytest.approx(6 / shown.per_minute * 60)
    assert f"4 of 10 (40%) rollouts; {shown.per_minute:,.1f} rollouts/min; " in str(shown)
    assert str(shown).endswith(" left")
    done = only(tmp_path / "run")
    assert (done.state, done.rows, done.progress) == ("complete", 10, None)


def test_failed_attempts_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below the table is a line of the run that has rollouts pending."""

    async def fails(request: Any) -> None:
        if b"4" in bytes(i for i in request.prompt_token_ids if i < 256):
            raise engine_fault()

    collected(tmp_path / "run", FakeSampler(before=fails), max_attempts=5)
    assert (progress(only(tmp_path / "run")).failures, progress(only(tmp_path / "run")).done) == ({"engine": 1}, 4)
    assert main(["ls", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "rollouts pending" in said
    assert ".: 4 of 5 (80%) rollouts; " in said
    assert "; failed attempts: engine 1\n" in said


def test_what_cannot_be_counted_is_warned_of_and_the_rest_is_listed(tmp_path: Path) -> None:
    """A sealed part of an unfinished run that is damaged ends no list."""

    async def fails(request: Any) -> None:
        if b"4" in bytes(i for i in request.prompt_token_ids if i < 256):
            raise engine_fault()

    collected(tmp_path / "left", FakeSampler(before=fails), max_attempts=5)
    write_run(tmp_path / "done", [rollout("t", 0, 1.0, two_turns(5, 40))])
    (part,) = (tmp_path / "left" / "rollouts").glob("*.parquet")
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.warns(DataWarning, match="left: "):
        found = {output.path: (output.state, output.progress) for output in ls(tmp_path).outputs}
    assert found == {"done": ("complete", None), "left": ("rollouts pending", None)}


def test_a_training_shows_its_steps_and_the_time_left(tmp_path: Path) -> None:
    """Of 2 epochs, step 3 is at epoch 0.5: 12 steps, at 10 s each."""
    rows = [{"step": n, "epoch": n / 6, "elapsed_s": 10.0 * n, "loss": 1.0 / n, "tokens_per_s": 7.0} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "torn')
    facts = {"stage": "train-sft", "status": "running", "settings": {"num_train_epochs": 2}, "files": []}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    lock = Lock(tmp_path)
    running = only(tmp_path)
    lock.release()
    assert running.state == "being written"
    assert progress(running) == RunProgress("steps", 3, 12, 6.0, 7.0, 90.0)
    assert str(progress(running)) == "3 of 12 (25%) steps; 6.0 steps/min; 7 tokens/s; 1 min left"
    assert (only(tmp_path).state, progress(only(tmp_path)).eta_s) == ("interrupted", None)


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
    assert (progress(running).wanted, progress(running).eta_s) == (left and 20, left)


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
    assert progress(only(tmp_path)).per_minute == speed


def test_a_run_of_another_machine_is_not_called_interrupted(tmp_path: Path) -> None:
    """Its lock cannot be seen from here, but names the machine that holds it."""
    attempts = [{"started_at": "2026-11-01T00:00:00+00:00", "ended_at": None}]
    facts = {"stage": "collect", "attempts": attempts, "files": []}
    (tmp_path / "run.json").write_text(json.dumps({**facts, "schemas": {"rollouts": 1}}))
    (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-11-01T00:00:00+00:00"}))
    assert (only(tmp_path).state, only(tmp_path).is_running) == ("on elsewhere", True)


def test_an_outage_that_lasts_is_seen_behind_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that last the longest decides, wherever it is in the list; none lasts in a run that has stopped."""
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    ended = {"began_at": "1970-01-01T00:15:00Z", "seconds": 30.0}
    lasting = [{"began_at": f"1970-01-01T00:{minute}:00Z", "seconds": None} for minute in ("10", "14")]
    for outages in ([*lasting, ended], [lasting[1], lasting[0]], [ended, *lasting]):
        spans, away_s = find_outages({"outages": outages}, is_running=True)
        assert (len(spans), away_s) == (len(outages), 400.0)
        assert find_outages({"outages": outages}, is_running=False)[1] is None
    assert find_outages({"outages": [ended]}, is_running=True) == ([(900.0, 930.0)], None)
