"""An engine's processes end with the command, however it ends, and only they do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

CHILD = """
import multiprocessing, os, sys, time
def child(pipe):
    from gymdata.engines.parent_death import die_with_parent
    die_with_parent()
    os.write(pipe, b"ready\\n")
    time.sleep(600)
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child, args=(1,)).start()
    time.sleep(600)
"""

ENGINE = """
import asyncio, os, sys
from gymdata.engines._vllm import VllmSampler
from gymdata.engines.port import SampleRequest
async def main():
    import signal
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: print("interrupted", flush=True))
    sampler = VllmSampler(sys.argv[1], sampling={}, engine_args={}, seed=0)
    await sampler.start()
    print("ready", flush=True)
    while True:
        line = await asyncio.to_thread(sys.stdin.readline)
        (out,) = await sampler.sample(SampleRequest(line, [5, 6, 7], 4, seed=1))
        print(out.token_ids, flush=True)
asyncio.run(main())
"""


def ends(pid: int, seconds: float) -> bool:
    """Whether a process, ours or not, ends within this time; returns as soon as it does."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("ours", [True, False])
def test_a_killed_parent_takes_its_engine_along(ours):
    """A child of a SIGKILLed command dies, and a process of another program's engine is left alone."""
    environment = {**os.environ, "GYMDATA_ENGINE_OF": "1"} if ours else dict(os.environ)
    environment.pop("GYMDATA_ENGINE_OF", None) if not ours else None
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        assert ends(child.pid, 30 if ours else 0.2) is ours
    finally:
        if child.is_running():
            child.kill()
        parent.stdout.close()


@pytest.mark.full
@pytest.mark.engine
def test_ctrl_c_ends_an_engine_that_is_starting(policy: str, tmp_path: Path) -> None:
    """It is announced as heard, the engine is not waited for, and none of its processes is left."""
    words = ["collect", "sample_data/tasks/train.jsonl", "-n", "2", "-m", policy, "-o", str(tmp_path / "run")]
    command = subprocess.Popen([sys.executable, "-m", "gymdata.cli", *words], stderr=subprocess.PIPE, text=True)
    assert command.stderr is not None
    said: list[str] = []
    for line in command.stderr:
        said.append(line)
        if line.startswith("starting vLLM"):
            break
    started = psutil.Process(command.pid)
    while command.poll() is None and not (children := started.children(recursive=True)):
        pass
    command.send_signal(signal.SIGINT)
    said += command.stderr
    assert command.wait() == 130, said
    assert said[-2:] == ["stopping: what is being started is ended\n", "interrupted\n"]
    assert all(ends(child.pid, 30) for child in children)


@pytest.mark.engine
@pytest.mark.full
def test_ctrl_c_spares_the_engine_and_sigkill_does_not_leave_it(policy):
    """SIGINT to the whole group leaves a sampling engine; SIGKILL of the command alone ends every process."""
    command = subprocess.Popen(
        [sys.executable, "-c", ENGINE, policy],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdin is not None
    assert command.stdout is not None
    try:
        assert command.stdout.readline() == "ready\n"
        children = psutil.Process(command.pid).children(recursive=True)
        assert len(children) >= 2
        command.stdin.write("a\n")
        command.stdin.flush()
        before = command.stdout.readline()
        os.killpg(command.pid, signal.SIGINT)
        assert command.stdout.readline() == "interrupted\n"
        command.stdin.write("b\n")
        command.stdin.flush()
        assert command.stdout.readline() == before
        command.kill()
        command.wait()
        assert all(ends(child.pid, 60) for child in children)
    finally:
        command.kill()
        for stream in (command.stdin, command.stdout):
            stream.close()
