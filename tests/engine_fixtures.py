"""The engines that the tests share: one vLLM server and at most one engine in this process, each started once.

``vllm_server``: base URL of a real vLLM server of the sample policy, in float32, which it serves as ``sample-policy``.
``vllm_sampler``: the sample policy in this process; ``.sampler``, ``.run`` to await things on its event loop, and
``.collect`` for a run of its rollouts.
``policy``: the sample policy's folder. A server that misbehaves is in ``tests/faulty_server.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gymdata.engines.port import Generation, SampleRequest

T = TypeVar("T")
POLICY = Path(__file__).parents[1] / "sample_data" / "policy"


@pytest.fixture(scope="session")
def policy() -> str:
    """The sample policy's folder."""
    return str(POLICY)


@pytest.fixture(scope="session")
def vllm_server(policy: str) -> Iterator[str]:
    """Base URL of a vLLM server of the sample policy, served as ``sample-policy`` in float32."""
    pytest.importorskip("vllm")
    port = free_port()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            server_command(policy, port),
            env=server_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            await_health(server, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def server_command(policy: str, port: int) -> list[str]:
    """How to serve a policy so that its rows are those of the engine in process."""
    from vllm.platforms import current_platform

    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", policy, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "sample-policy", "--dtype", "float32"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", "256", "--disable-uvicorn-access-log"]
    if current_platform.is_cpu():
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
    else:
        command += ["--gpu-memory-utilization", "0.2"]
    return command


def server_environment() -> dict[str, str]:
    """The environment of a server that a test starts."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    return {**defaults, **os.environ, "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_health(server: subprocess.Popen[bytes], port: int, log: Any) -> None:
    """Return when the server answers; fail with its log when it ends or takes five minutes."""
    deadline = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.25)
    log.seek(0)
    pytest.fail(f"the vLLM server did not come up:\n{log.read()[-4000:].decode(errors='replace')}")


@dataclass
class InProcess:
    """An engine and the event loop that it lives on."""

    sampler: Any
    run: Callable[[Coroutine[Any, Any, T]], T]

    def collect(self, **settings: Any) -> Any:
        """``gymdata.collect`` with these settings, in a thread, on this engine."""
        from gymdata.commands.collect.run import collect, load_parts
        from gymdata.commands.collect.settings import CollectConfig

        async def work() -> Any:
            config = CollectConfig.load(None, settings)
            parts = load_parts(config)
            parts.sampler = Borrowed(self, asyncio.get_running_loop())
            return await asyncio.to_thread(collect, config=config, parts=parts)

        return self.run(work())


@pytest.fixture(scope="session")
def vllm_sampler(policy: str) -> Iterator[InProcess]:
    """The sample policy on vLLM in this process, at temperature 1 with the two best alternatives."""
    pytest.importorskip("vllm")
    from gymdata.engines._vllm import VllmSampler

    with asyncio.Runner() as runner:
        sampler = VllmSampler(policy, sampling={"temperature": 1.0, "top_logprobs": 2}, engine_args={}, seed=0)
        runner.run(sampler.start())
        try:
            yield InProcess(sampler, runner.run)
        finally:
            runner.run(sampler.close())


class Borrowed:
    """The tests' shared engine, which lives on another event loop; closing it is left to its owner."""

    prefers_groups = False
    default_concurrency = 64

    def __init__(self, engine: InProcess, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine.sampler, loop

    async def start(self) -> Mapping[str, Any]:
        return self._engine.facts()  # type: ignore[no-any-return]  # the other loop's, without types

    async def sample(self, request: SampleRequest) -> list[Generation]:
        work = asyncio.run_coroutine_threadsafe(self._engine.sample(request), self._loop)
        return await asyncio.wrap_future(work)

    async def close(self) -> None: ...
