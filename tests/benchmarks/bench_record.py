"""What ``record`` costs: the same clients through it and on the bare vLLM server, in turn, on the sample policy.

Both engines have the same settings and answer with exactly 32 tokens; a session is two requests, the second of which sends
the first answer back, and with ``record`` a third that ends it, by which its row is written. ``record`` has its engine in
process; it keeps the ids and log-probabilities of every call, which the bare server does not give. Memory is that of its own
process, without the engine's, with its peak reset before each load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_collect import CONTEXT, POLICY, ROOT, _Server
from tests.benchmarks.rows import Row, seconds

TOKENS, CLIENTS, SESSIONS, RUNS = 32, 64, 256, 5
MANY, MANY_SESSIONS = 512, 1_536


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch, _Server(POLICY) as bare, _recorder(Path(scratch)) as (ours, pid):
        rows = []
        for stream in (False, True):
            what = f"record, {CLIENTS} clients at a time, {'streamed' if stream else 'whole'} answers"
            rows.append(_throughput(what, ours, bare, stream))
        few, many = _peak(ours, pid, CLIENTS), _peak(ours, pid, MANY)
        text = f"{MANY_SESSIONS:,} sessions, {MANY} at a time: {many:,.0f} MiB"
        rows.append(
            Row(
                "record, peak memory of its process",
                text,
                f"{CLIENTS} at a time: {few:,.0f} MiB",
                many / few,
                at_most=1.5,
            )
        )
        return rows


def _throughput(what: str, ours: str, bare: str, stream: bool) -> Row:
    times: dict[str, list[float]] = {ours: [], bare: []}
    for url in (bare, ours):
        asyncio.run(_load(url, CLIENTS, CLIENTS, stream=stream, recorded=url == ours))
    for _ in range(RUNS):
        for url in (bare, ours):
            began = time.perf_counter()
            asyncio.run(_load(url, SESSIONS, CLIENTS, stream=stream, recorded=url == ours))
            times[url].append(time.perf_counter() - began)
    ratio = statistics.median(b / o for o, b in zip(times[ours], times[bare], strict=True))
    tokens = 2 * SESSIONS * TOKENS
    texts = [f"{tokens / statistics.median(times[url]):,.0f} tok/s, {seconds(times[url])}" for url in (ours, bare)]
    return Row(what, texts[0], f"vllm serve {texts[1]}", ratio, at_least=0.9)


def _peak(url: str, pid: int, at_a_time: int) -> float:
    """The peak of resident memory in MiB while that many sessions run at a time."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    asyncio.run(_load(url, MANY_SESSIONS, at_a_time, stream=True, recorded=True))
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _body(messages: list[Any], *, stream: bool) -> dict[str, Any]:
    return {
        "model": "sample-policy",
        "messages": messages,
        "min_tokens": TOKENS,
        "max_tokens": TOKENS,
        "stream": stream,
    }


async def _load(url: str, sessions: int, at_a_time: int, *, stream: bool, recorded: bool) -> None:
    """Two requests for each session, the second with the first answer."""
    import aiohttp

    places = asyncio.Semaphore(at_a_time)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def ask(at: str, messages: list[Any]) -> str:
            async with http.post(f"{at}/v1/chat/completions", json=_body(messages, stream=stream)) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{url}: {response.status}: {raw[:300]!r}")
            if not stream:
                return json.loads(raw)["choices"][0]["message"]["content"] or ""
            chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
            if errors := [chunk for chunk in chunks if "error" in chunk]:
                raise RuntimeError(f"{url}: {errors[0]}")
            return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])

        async def session(number: int) -> None:
            key = secrets.token_hex(8)
            at = f"{url}/s/{key}" if recorded else url
            async with places:
                messages: list[Any] = [{"role": "user", "content": f"What is {number % 900 + 100}+{number // 900}?"}]
                messages.append({"role": "assistant", "content": await ask(at, messages)})
                await ask(at, [*messages, {"role": "user", "content": "And twice that?"}])
                if recorded:
                    async with http.post(f"{url}/rollouts/{key}/finish", json={"reward": 1.0}) as response:
                        response.raise_for_status()

        await asyncio.gather(*map(session, range(sessions)))


@contextlib.contextmanager
def _recorder(folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process of ``gymdata record`` with its engine in process."""
    from tests.engine_fixtures import _free_port, server_environment

    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "gymdata",
        "record",
        "-m",
        str(POLICY),
        "-o",
        str(folder / "run"),
        "--port",
        str(port),
    ]
    command += ["--set", f"engine.max_model_len={CONTEXT}", "--max-sessions", "100000", "--idle-timeout", "100000"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=server_environment(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            for _ in range(1200):
                if process.poll() is not None:
                    raise RuntimeError(f"record ended:\n{(folder / 'log').read_text()[-3000:]}")
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
                time.sleep(0.25)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
