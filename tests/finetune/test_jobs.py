"""Training jobs that are processes: how they fail, and what is left of an earlier try."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.finetune.jobs import CollectingBuilder, CommandJobs, CommandRunner, TrlJobs, follow_log, start
from gymdata.commands.finetune.port import CollectOrder, TrainingJob
from gymdata.commands.finetune.settings import CollectBuilder, CommandAdapter, TrlAdapter
from gymdata.commands.train.settings import TRAINERS
from gymdata.errors import GymdataError, OutsideError, RewardError, UsageError
from gymdata.workers.signals import last_lines
from tests.finetune.parts import Watched
from tests.model_files import write_adapter

pytestmark = pytest.mark.torch

TRAINS = "import sys, pathlib; out = pathlib.Path(sys.argv[1]); (out / 'config.json').write_text('{}')"


def job(folder: Path) -> TrainingJob:
    return TrainingJob("run-epoch-001", 1, "dpo", folder / "pairs.parquet", folder / "start", folder / "policy", seed=7)


def command(code: str, *words: str, **settings: Any) -> CommandJobs:
    return CommandJobs(CommandAdapter(command=[sys.executable, "-c", code, *words], **settings))


def test_a_command_that_leaves_a_model_has_trained(tmp_path: Path) -> None:
    """Placeholders are filled, and {output} begins empty."""
    code = TRAINS + "; (out / 'said').write_text(' '.join(sys.argv[2:]))"
    jobs = command(code, "{output}", "{data}", "{model}", "{epoch}", "{seed}", "{algorithm}", "{other}", env={"A": "b"})
    one = job(tmp_path)
    one.output.mkdir()
    (one.output / "left.bin").touch()
    jobs.train(one, Watched())
    said = (one.output / "said").read_text().split()
    assert said == [str(one.data), str(one.model), "1", "7", "dpo", "{other}"]
    assert not (one.output / "left.bin").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('out of memory')", r"exit code 1; its last words:\n +out of memory"),
        ("pass", "holds no model"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_a_command_that_fails_has_failed(tmp_path: Path, code: str, message: str) -> None:
    """An exit code, a signal or a missing model is a failed job with its last words."""
    with pytest.raises(OutsideError, match=rf"trainer: epoch 1: the dpo job failed: (.|\n)*{message}") as caught:
        command(code).train(job(tmp_path), Watched())
    assert caught.value.exit_code == 3


def test_a_job_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """timeout_s ends the process; the job has failed, and says why."""
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(OutsideError, match=r"timeout_s, 0\.5 s"):
        command(code, timeout_s=0.5).train(job(tmp_path), Watched())
    log = (tmp_path / "logs" / "train.log").read_text()
    # One that was stopped before it could say its number is gone as well.
    assert not log or not Path(f"/proc/{int(log)}").exists()


def test_progress_is_what_the_log_says(tmp_path: Path) -> None:
    """A line such as "training 3/12" is passed on while the command runs."""
    watched = Watched()
    code = "import signal; print('training 3/12  4/min', flush=True); signal.pause()"
    with pytest.raises(OutsideError):
        command(code, timeout_s=5.0).train(job(tmp_path), watched)
    assert watched.counts[-1] == {"done": 3, "total": 12}


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("training 1,200/3,000  loss 0.31  lr 1e-05", {"done": 1200, "total": 3000, "loss": 0.31}),
        ("training 3/12  loss -2.5e-05  12 tok/s", {"done": 3, "total": 12, "loss": -2.5e-05}),
        ("training 3/12  loss nan", {"done": 3, "total": 12}),
        ("written to x", None),
    ],
)
def test_the_log_passes_on_counts_and_loss(tmp_path: Path, line: str, counts: dict[str, float] | None) -> None:
    """The last line of a training's log gives its step, its steps and its loss; another line gives nothing."""
    seen: list[dict[str, float]] = []

    class Notes:
        """Progress that remembers."""

        def update(self, **found: float) -> None:
            seen.append(found)

        def message(self, text: str) -> None: ...

    (tmp_path / "log").write_text(f"before\n{line}\n")
    follow_log(tmp_path / "log", Notes())
    assert seen == ([counts] if counts else [])


def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """SIGKILL of the parent ends the child at once, so that nothing works on in the loop's folders."""
    code = (
        "import sys, pathlib, signal; from gymdata.commands.finetune.jobs import start; "
        "p = start([sys.executable, '-c', 'import signal; print(1, flush=True); signal.pause()'], "
        "pathlib.Path(sys.argv[1])); print(p.pid, flush=True); signal.pause()"
    )
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", code, str(log)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    while not (log.is_file() and log.read_text()):
        os.sched_yield()
    watched = os.pidfd_open(child)
    parent.kill()
    parent.communicate()
    assert select.select([watched], [], [], 60.0)[0]
    os.close(watched)


def test_a_command_that_is_not_there_is_the_trainers_failure(tmp_path: Path) -> None:
    """Exit code 3 before anything is started, naming the word."""
    with pytest.raises(OutsideError, match="no-such-trainer"):
        CommandJobs(CommandAdapter(command="no-such-trainer {data}")).train(job(tmp_path), Watched())


def test_what_a_job_reads(tmp_path: Path) -> None:
    """Each algorithm has its data; formats of export are asked for by name; an unknown algorithm names the known."""
    trl = TrlJobs(TrlAdapter())
    assert [trl.data(name) for name in ("sft", "dpo", "kto", "rl")] == ["rollouts", "pairs", "rollouts", "experiences"]
    assert CommandJobs(CommandAdapter(command="x", format="trl-messages")).data("any") == "export:trl-messages"
    assert CommandJobs(CommandAdapter(command="x")).data("any") == "pairs"
    with pytest.raises(UsageError, match="did you mean 'dpo'"):
        trl.data("dpoo")


def test_an_adapter_is_trained_further(tmp_path: Path) -> None:
    """With LoRA the model of a later epoch is an adapter, and that of the first may be: it gets no second one."""
    jobs, first = TrlJobs(TrlAdapter(dpo={"trainer": {"use_peft": True}})), job(tmp_path)
    assert jobs.words(first)[0][-2] == "--config"
    write_adapter(first.model)
    words, _ = jobs.words(first)
    given = {"model": str(first.model), "output": str(first.output)}
    assert TRAINERS["dpo"].load(Path(words[-3]), given, [words[-1]]).trainer["use_peft"] is False


def test_a_launcher_starts_the_training(tmp_path: Path) -> None:
    """Its words stand before ``-m gymdata`` and the command, as ``accelerate launch`` wants them."""
    words, _ = TrlJobs(TrlAdapter(launcher=["accelerate", "launch", "--num_processes", "2"])).words(job(tmp_path))
    assert words[:7] == ["accelerate", "launch", "--num_processes", "2", "-m", "gymdata", "train-dpo"]


def test_gymdatas_trainers_get_their_settings_in_a_file(tmp_path: Path) -> None:
    """Settings of all algorithms lie under those of the one; a try that was cut off before its first file,
    or had other settings, is removed; any other is gone on with."""
    trl = TrlJobs(TrlAdapter(settings={"bf16": False, "seed": 1}, dpo={"beta": 0.5}, rl={"loss": "cispo"}))
    words, _ = trl.words(job(tmp_path))
    assert words[2:7] == ["gymdata.cli", "train-dpo", str(tmp_path / "pairs.parquet"), "-m", str(tmp_path / "start")]
    assert words[-2] == "--config"
    assert json.loads((tmp_path / "train.yaml").read_text()) == {"seed": 1, "bf16": False, "beta": 0.5}
    torn = tmp_path / "policy" / "job"
    torn.mkdir(parents=True)
    (torn / "job.json").write_text('{"tor')
    trl.prepare(job(tmp_path))
    assert not (tmp_path / "policy").exists()
    torn.mkdir(parents=True)
    (torn / "job.json").write_text("{}")
    trl.prepare(job(tmp_path))
    assert torn.exists()
    TrlJobs(TrlAdapter(dpo={"beta": 0.1})).prepare(job(tmp_path))
    assert not (tmp_path / "policy").exists()


def test_a_commands_answer_and_failure(tmp_path: Path) -> None:
    """What a command printed comes back; its error carries its exit code and its last words; a Ctrl-C is one here too."""
    runner, log = CommandRunner(), tmp_path / "x.log"
    sql = ["query", "SELECT 1 AS one", str(Path(__file__).parents[2] / "sample_data" / "rollouts" / "clean.jsonl")]
    assert runner.run(sql, log, Watched())["rows"] == [{"one": 1}]
    with pytest.raises(GymdataError, match=r"`gymdata pairs` ended with exit code 2:\n(.|\n)*no such file") as caught:
        runner.run(["pairs", "nowhere"], log, Watched())
    assert caught.value.exit_code == 2
    # An error is JSON too, and no answer, although its exit code is that of an answer with faults.
    broken = str(Path(__file__).parents[2] / "sample_data" / "rollouts" / "broken.jsonl")
    with pytest.raises(GymdataError, match=r"`gymdata pairs` ended with exit code 1") as caught:
        runner.run(["pairs", broken, "-o", str(tmp_path / "pairs")], log, Watched())
    assert caught.value.exit_code == 1
    assert last_lines(tmp_path / "absent") == []


def test_an_interrupted_child_interrupts_the_loop(tmp_path: Path) -> None:
    """A trainer that stopped on Ctrl-C (exit code 130) interrupts the loop."""
    with pytest.raises(KeyboardInterrupt):
        command("import sys; sys.exit(130)").train(job(tmp_path), Watched())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert start([sys.executable, "-c", ""], tmp_path / "log").wait() == 0


def test_rollouts_that_a_reward_failed_on_are_the_rewards_fault(tmp_path: Path) -> None:
    """The first reason of the function stands in the error, which is neither the environment's nor a defect."""
    part = {"failed": 8, "first_error": "f returned 1 value for 8 rollouts, expected one for each (r.py:1)"}
    parts = {"f": part, "g": {"failed": 0, "first_error": None}}

    class Collected:
        """A port.Commands whose collect printed this summary."""

        def run(self, words: Any, log: Path, progress: Any) -> dict[str, Any]:
            return {"reward_faults": 8, "parts": parts, "tasks": 2, "rollouts": 8, "exit_code": 1}

    builder = CollectingBuilder(CollectBuilder(), Collected(), {})
    order = CollectOrder("tasks.jsonl", tmp_path / "epoch-001" / "rollouts", None, 0, "run", 1)
    with pytest.raises(RewardError) as caught:
        builder.collect(order, Watched())
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("reward: 8 rollouts could not be scored; first: f returned 1 value")
