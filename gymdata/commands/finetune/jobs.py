"""The shipped trainer adapters: gymdata's own training commands (``_type: trl``), and any command (``_type: command``).

Invariants: a job is a child process, and has succeeded only when that ended with 0 and left a model. A child ends when the
loop's process ends, however that ends, so that a restarted loop finds no process at work in its folders; its output is
in its log, and its failure shows the last lines of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gymdata.commands.finetune.port import CollectOrder, Commands, TrainingJob
from gymdata.commands.finetune.settings import CollectBuilder, CommandAdapter, TrlAdapter
from gymdata.errors import EXIT_FAULTS, EXIT_INTERRUPTED, GymdataError, OutsideError, RewardError, UsageError, counted
from gymdata.progress import Progress
from gymdata.public import Figures
from gymdata.settings import Settings
from gymdata.store.reading import child_environment
from gymdata.store.run_json import plain, write_json
from gymdata.urls import for_child, placeholder_values
from gymdata.workers import python_module
from gymdata.workers.signals import OWN_GROUP, how_ended, interruptions_passed_to, last_lines, send

#: Becomes the command after asking Linux to end it with its parent; a parent that is gone already is noticed.
_LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.5


def gymdata_words(words: Sequence[str]) -> list[str]:
    """The command line of one of gymdata's own commands."""
    return [*python_module("gymdata.cli"), *words]


def start(
    words: Sequence[str],
    log: Path,
    *,
    stdout: int | IO[Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``words`` so that they end with this process. Their stderr, and stdout unless it is given, are added to ``log``.

    To be called from the main thread: Linux ends a child with the thread that started it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as noise:
        return subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _LAUNCH, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=noise if stdout is None else stdout,
            stderr=noise,
            env={**os.environ, **child_environment(), **placeholder_values(), **(environment or {})},
            **OWN_GROUP,
        )


def wait(process: subprocess.Popen[bytes], log: Path, progress: Progress, timeout_s: float | None = None) -> int:
    """The exit code, once it has ended; ``progress`` gets the log's last line meanwhile. Ctrl-C is passed on to the
    child. Raises subprocess.TimeoutExpired."""
    left = timeout_s
    with interruptions_passed_to(process):
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                follow_log(log, progress)
                if left is not None and (left := left - _POLL_S) <= 0:
                    raise


def follow_log(log: Path, progress: Progress) -> None:
    """Report the progress and the loss in the log's last line, as in ``training 12/40 loss 0.31``."""
    lines = last_lines(log, 1)
    if lines and (match := re.search(r"(\d[\d,]*)/(\d[\d,]*)", lines[-1])):
        done, total = (int(number.replace(",", "")) for number in match.groups())
        loss = re.search(r"\bloss (-?\d[\d.e+-]*)", lines[-1])
        progress.update(done=done, total=total, **({"loss": float(loss[1])} if loss else {}))


def complete(label: str, words: Sequence[str], log: Path, progress: Progress) -> None:
    """Run ``words`` to their end. Raises the error of ``failed``."""
    code = wait(start(words, log), log, progress)
    if code != 0:
        raise failed(label, code, log)


class CommandRunner:
    """Runs gymdata's commands (implements ``port.Commands``)."""

    def run(self, words: Sequence[str], log: Path, progress: Progress) -> Figures:
        """``gymdata WORDS --json``; what it printed, with ``exit_code`` (0, or 1: faults found).

        Raises KeyboardInterrupt after a Ctrl-C, and a GymdataError with the command's exit code when it printed nothing.
        """
        answer = log.with_suffix(".out")
        answer.parent.mkdir(parents=True, exist_ok=True)
        with answer.open("wb") as out:
            process = start(gymdata_words([*words, "--json"]), log, stdout=out)
        code = wait(process, log, progress)
        text = answer.read_text(errors="replace").strip()
        answer.unlink()
        if code in (EXIT_INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        if code not in (0, 1) or not text:
            raise failed(f"`gymdata {words[0]}`", code, log)
        printed = json.loads(text.splitlines()[-1])
        if isinstance(printed, dict) and "error" in printed:
            raise failed(f"`gymdata {words[0]}`", code, log)
        return {**printed, "exit_code": code} if isinstance(printed, dict) else {"exit_code": code, "value": printed}


def failed(label: str, code: int, log: Path) -> GymdataError:
    """The error of a child that ended with ``code``; its exit code is the child's (3 when a signal ended it)."""
    last_output = "\n".join(f"    {line}" for line in last_lines(log))
    text = f"{label} {how_ended(code)}" + (f":\n{last_output}" if last_output else "")
    return GymdataError(text, hint=f"the whole log is {log}", exit_code=code if code > 0 else 3)


class CollectingBuilder:
    """``base``: what the llms and eval sections say, under the builder's own settings."""

    def __init__(self, config: CollectBuilder, commands: Commands, base: Mapping[str, Any]) -> None:
        self.config, self._commands, self.base = config, commands, dict(base)

    def collect(self, order: CollectOrder, progress: Progress) -> None:
        keys = {"num_generations": self.config.num_generations, **self.base, **self.config.settings, **order.settings}
        keys["num_rollouts"] = keys.pop("num_generations")
        allow_missing = float(keys.pop("allow_missing", self.config.allow_missing))
        decided = {
            "tasks": order.tasks,
            "output": str(order.output),
            "policy_version": order.policy_version,
            "run_id": order.run_id,
            "seed": order.seed,
            "reward": list(order.reward),
        }
        model = {"model": order.model} if order.model is not None else {}
        file = settings_file(order.output.parent / f"{order.output.name}.collect.yaml", {**keys, **model, **decided})
        log = order.output.parent / "logs" / f"{order.output.name}.log"
        result = self._commands.run(["collect", "--config", str(file)], log, progress)
        if result.get("reward_faults"):
            first = next((part["first_error"] for part in result["parts"].values() if part["failed"]), None)
            why = f"{counted(result['reward_faults'], 'rollout')} could not be scored"
            why += f"; first: {first}" if first else ""
            raise RewardError(why, hint=f"the whole log is {log}; mend the reward and run the same command again")
        total = int(result["tasks"]) * keys["num_rollouts"]
        missing = total - int(result["rollouts"])
        if result["exit_code"] == EXIT_FAULTS and missing > allow_missing * total:
            text = f"{missing:,} of {counted(total, 'rollout')} are missing, allow_missing is {allow_missing:g}"
            hint = f"{order.output}/failures.jsonl says why; the same command tries again (see max_attempts)"
            raise GymdataError(text, hint=hint, exit_code=EXIT_FAULTS)


def settings_file(path: Path, settings: Settings) -> Path:
    """Write a command's settings, as JSON, which YAML reads. Paths and other objects are text; for what is secret in URLs
    there are placeholders, which ``start`` puts into the command's environment."""
    return write_json(path, for_child(plain(settings)))


#: Algorithm → (command, what it reads).
TRAININGS = {
    "sft": ("train-sft", "rollouts"),
    "dpo": ("train-dpo", "pairs"),
    "kto": ("train-kto", "rollouts"),
    "rl": ("train-rl", "experiences"),
}
#: Formats of ``gymdata export`` aside, what a job can read.
TABLES = ("rollouts", "pairs", "experiences")
_MODEL_FILES = ("config.json", "adapter_config.json")


class ProcessJobs:
    """Jobs that are child processes."""

    _timeout_s: float | None = None

    def words(self, job: TrainingJob) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command line of a job, and what it adds to the environment."""
        raise NotImplementedError

    def prepare(self, job: TrainingJob) -> None:
        """Deal with what an earlier try left in ``job.output``."""
        raise NotImplementedError

    def train(self, job: TrainingJob, progress: Progress) -> None:
        self.prepare(job)
        words, environment = self.words(job)
        log = job.output.parent / "logs" / "train.log"
        process = start(words, log, environment=environment)
        try:
            code = wait(process, log, progress, self._timeout_s)
        except subprocess.TimeoutExpired as error:
            _stop(process)
            raise _failure(job, f"it took longer than timeout_s, {self._timeout_s:g} s") from error
        if code in (EXIT_INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        if code != 0:
            last_output = "\n".join(f"    {line}" for line in last_lines(log))
            raise _failure(job, f"{how_ended(code)}; its last words:\n{last_output}")
        if not any((job.output / name).is_file() for name in _MODEL_FILES):
            raise _failure(job, f"ended with exit code 0, but {job.output} holds no model")


def _failure(job: TrainingJob, why: str) -> OutsideError:
    text = f"epoch {job.epoch}: the {job.algorithm} job failed: {why}"
    return OutsideError("trainer", text, hint="the epochs before it are kept; the same command tries this one again")


def _stop(process: subprocess.Popen[bytes]) -> None:
    send(process, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        send(process, signal.SIGKILL)
        process.wait()


class TrlJobs(ProcessJobs):
    """``gymdata train-sft``, ``-dpo``, ``-kto`` and ``-rl``; resumes from the last checkpoint."""

    def __init__(self, config: TrlAdapter) -> None:
        self._config = config

    def data(self, algorithm: str) -> str:
        if algorithm not in TRAININGS:
            raise UsageError.unknown_choice("finetuning.algorithm", algorithm, TRAININGS)
        return TRAININGS[algorithm][1]

    def words(self, job: TrainingJob) -> tuple[Sequence[str], Mapping[str, str]]:
        file = settings_file(job.output.parent / "train.yaml", self._settings(job))
        command = [TRAININGS[job.algorithm][0], str(job.data), "-m", str(job.model), "-o", str(job.output)]
        # An adapter, that of an earlier epoch or the one to begin with, is trained further: a second one over it is refused.
        lora = ["--set", "use_peft=false"] if (job.model / "adapter_config.json").is_file() else []
        words = [*command, "--config", str(file), *lora]
        launcher = self._config.launcher
        return [*launcher, "-m", "gymdata", *words] if launcher else gymdata_words(words), {}

    def prepare(self, job: TrainingJob) -> None:
        if not job.output.exists():
            return
        # Killed while its first file was written: nothing was trained, and nothing could be resumed.
        begun = _read(job.output / "job" / "job.json") is not None
        # A training with other settings cannot be resumed.
        same = _read(job.output.parent / "train.yaml") == plain(self._settings(job))
        if not (begun and same):
            shutil.rmtree(job.output)

    def _settings(self, job: TrainingJob) -> Settings:
        return {"seed": job.seed, **self._config.settings, **getattr(self._config, job.algorithm)}


class CommandJobs(ProcessJobs):
    """Any trainer that a command starts. Each try begins with an empty {output}."""

    def __init__(self, config: CommandAdapter) -> None:
        self._config, self._timeout_s = config, config.timeout_s
        self._words = shlex.split(config.command) if isinstance(config.command, str) else list(config.command)
        if not self._words:
            raise UsageError.bad_value("trainer_adapters: command", config.command, "words of a command")

    def data(self, algorithm: str) -> str:  # noqa: ARG002 - what a format holds is the configuration's choice
        return self._config.format if self._config.format in TABLES else f"export:{self._config.format}"

    def words(self, job: TrainingJob) -> tuple[Sequence[str], Mapping[str, str]]:
        replacements = {
            "data": job.data,
            "model": job.model,
            "output": job.output,
            "epoch": job.epoch,
            "seed": job.seed,
            "algorithm": job.algorithm,
        }
        words = list(self._words)
        for name, value in replacements.items():
            # Other braces stay as they are, since commands use them too.
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        return words, self._config.env

    def prepare(self, job: TrainingJob) -> None:
        if job.output.exists():
            shutil.rmtree(job.output)
        job.output.mkdir(parents=True)

    def train(self, job: TrainingJob, progress: Progress) -> None:
        words, _ = self.words(job)
        if shutil.which(words[0]) is None and not Path(words[0]).is_file():
            raise OutsideError("trainer", f"{words[0]!r} is no command that can be found", hint="give its full path")
        super().train(job, progress)


def _read(path: Path) -> Figures | None:
    """A JSON object; None when it is missing or incomplete."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return facts if isinstance(facts, dict) else None
