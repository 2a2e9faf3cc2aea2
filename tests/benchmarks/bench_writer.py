"""What the one process that collects can take: its journal with fsync, and its CPU time and bytes on the network a token.

The writer: rollouts of 200 prompt and 1,000 sampled tokens (Zipf ids over 151,000, log-probabilities drawn as
−exponential) are journaled and sealed, as ``collect`` does it; the rival writes the same bytes to one file with an fsync a
second. The driver: ``collect`` from two servers that answer at once, in vLLM's format, 8 rollouts of 1,000 tokens a request;
its own CPU time counts. Each measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tests.benchmarks.rows import Row

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
PROMPT, GENERATED, ROWS, VOCABULARY = 200, 1_000, 6_000, 151_000
TASKS, GROUP = 250, 8


def main() -> list[Row]:
    rows = []
    for what, interval in (("an fsync a second", 1.0), ("an fsync a rollout", 0.0)):
        found = _measure("write", str(interval))
        plain = _measure("plain", str(interval), str(found["line_bytes"]))
        rows.append(Row(
            f"the writer, {what}",
            f"{found['tokens_per_s'] / 1e6:.2f} M tokens/s, {found['cpu_ns']:.0f} ns of CPU a token; journal "
            f"{found['journal_bytes']:.1f}, sealed {found['sealed_bytes']:.1f} bytes a token",
            f"the same bytes to a file {plain['tokens_per_s'] / 1e6:.2f} M tokens/s",
            found["tokens_per_s"] / plain["tokens_per_s"],
        ))  # fmt: skip
    found = _measure("drive")
    rows.append(Row(
        "the driver, two servers that answer at once",
        f"{found['tokens_per_s'] / 1e3:.0f} k tokens/s, {found['cpu_ns'] / 1e3:.2f} µs of CPU a token",
        f"{found['network_bytes']:.0f} bytes a token on the network",
        found["cpu_ns"] / 1e3,
    ))  # fmt: skip
    return rows


def _measure(*words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_writer", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _ids(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.minimum(rng.zipf(1.2, n), VOCABULARY - 1).astype(np.int32)


# --- the writer ---------------------------------------------------------------------------------------------------------


def _row(number: int, rng: np.random.Generator) -> dict[str, Any]:
    from gymdata.rollouts.turns import Call, encode_turns

    log_probs = -rng.exponential(1.0, GENERATED).astype(np.float32)
    turns = encode_turns([Call(_ids(rng, PROMPT), _ids(rng, GENERATED), log_probs, "stop")])
    text = {"reasoning": None, "tool_calls": None, "tool_call_id": None, "name": None, "extra": None}
    return {
        "rollout_id": f"{number:032x}", "run_id": "one", "task_id": str(number // 8), "group_id": f"g{number // 8}",
        "rollout_index": number % 8, "policy": "p", "policy_hash": "0", "policy_version": 0, "status": "completed",
        "stop_reason": "stop", "finish_reason": "stop", "reward": 1.0, "rewards": [{"name": "r", "value": 1.0}],
        "temperature": 1.0, "n_turns": 1, "n_breaks": 0, "n_context_tokens": PROMPT, "n_generated_tokens": GENERATED,
        "messages": [
            {"role": "user", "content": "q" * 4 * PROMPT, "turn": None, **text},
            {"role": "assistant", "content": "a" * 4 * GENERATED, "turn": 0, **text},
        ],
        "tools": "[]", "task": "{}", "extra": "{}", "turns": turns,
        "started_at": dt.datetime.now(dt.UTC), "duration_s": 1.0,
    }  # fmt: skip


def _write(interval: float) -> dict[str, float]:
    from gymdata.store.run import Run

    rng = np.random.default_rng(0)
    rows = [_row(number, rng) for number in range(ROWS)]
    with tempfile.TemporaryDirectory(dir=ROOT) as scratch:
        run = Run.open(Path(scratch) / "run", identity={}, extent={}, operation={}, fsync_interval_s=interval)
        began, cpu = time.monotonic(), _cpu_s()
        for row in rows:
            run.append(row)
        size = sum(file.stat().st_size for file in (Path(scratch) / "run" / "rollouts").glob("part-*.jsonl"))
        run.close()
        took, used = time.monotonic() - began, _cpu_s() - cpu
        sealed = sum(file.stat().st_size for file in (Path(scratch) / "run" / "rollouts").glob("part-*.parquet"))
    tokens = ROWS * (PROMPT + GENERATED)
    return {
        "tokens_per_s": tokens / took, "cpu_ns": used / tokens * 1e9, "journal_bytes": size / tokens,
        "sealed_bytes": sealed / tokens, "line_bytes": size / ROWS,
    }  # fmt: skip


def _plain(interval: float, line_bytes: float) -> dict[str, float]:
    line = os.urandom(int(line_bytes))
    with tempfile.NamedTemporaryFile(dir=ROOT) as file:
        began = synced = time.monotonic()
        for _ in range(ROWS):
            os.write(file.fileno(), line)
            if time.monotonic() - synced >= interval:
                os.fsync(file.fileno())
                synced = time.monotonic()
        os.fsync(file.fileno())
        return {"tokens_per_s": ROWS * (PROMPT + GENERATED) / (time.monotonic() - began)}


# --- the driver ---------------------------------------------------------------------------------------------------------


def _drive() -> dict[str, float]:
    import gymdata

    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.bench_writer", "serve"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        urls = [f"http://127.0.0.1:{int(server.stdout.readline())}" for server in servers if server.stdout is not None]
        rng = np.random.default_rng(0)
        tasks = [
            {"task_id": str(n), "prompt": f"{n} {' '.join(map(str, rng.integers(0, 99, 60)))}"} for n in range(TASKS)
        ]
        with tempfile.TemporaryDirectory(dir=ROOT) as scratch:
            settings = {
                "endpoint": urls,
                "model": "instant",
                "tokenizer": str(POLICY),
                "max_tokens": GENERATED,
                "seed": 1,
            }
            gymdata.collect(tasks[:8], output=Path(scratch) / "warm", num_rollouts=GROUP, **settings)
            before = sum(_bytes(url) for url in urls)
            began, cpu = time.monotonic(), _cpu_s()
            gymdata.collect(tasks, output=Path(scratch) / "run", num_rollouts=GROUP, **settings)
            took, used = time.monotonic() - began, _cpu_s() - cpu
            sent = sum(_bytes(url) for url in urls) - before
    finally:
        for server in servers:
            server.kill()
            server.wait()
    tokens = TASKS * GROUP * GENERATED
    return {"tokens_per_s": tokens / took, "cpu_ns": used / tokens * 1e9, "network_bytes": sent / tokens}


def _bytes(url: str) -> int:
    with urllib.request.urlopen(f"{url}/bytes") as answer:
        return int(answer.read())


def _answer(rng: np.random.Generator, n: int, greedy: bool) -> bytes:
    """What a choice of n tokens holds beside its index and its prompt, in vLLM's format."""
    ids = rng.integers(10, 400, n).tolist()
    values = [0.0] * n if greedy else (-rng.exponential(1.0, n)).tolist()
    names = [f"token_id:{i}" for i in ids]
    tops = [{name: value} for name, value in zip(names, values, strict=True)]
    log_probs = {
        "text_offset": list(range(0, 4 * n, 4)),
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": tops,
    }
    choice = {
        "text": "word" * n,
        "logprobs": log_probs,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
    }
    return orjson.dumps(choice)[1:]


def _serve() -> None:
    from aiohttp import web

    rng, moved = np.random.default_rng(os.getpid()), [0]
    ready = [_answer(rng, GENERATED, False) for _ in range(64)]

    async def completions(request: web.Request) -> web.Response:
        raw = await request.read()
        body = orjson.loads(raw)
        prompt, n = orjson.dumps(body["prompt"]), body["max_tokens"]
        parts = []
        for index in range(body.get("n", 1)):
            made = ready[(body.get("seed", 0) + index) % 64] if n == GENERATED else None
            if made is None:
                made = _answer(
                    np.random.default_rng(sum(body["prompt"])), n, body.get("top_k") == 1 or body["logprobs"] > 0
                )
            parts.append(b'{"index":%d,"prompt_token_ids":%b,%b' % (index, prompt, made))
        answer = b'{"id":"x","model":"instant","choices":[%b]}' % b",".join(parts)
        moved[0] += len(raw) + len(answer)
        return web.Response(body=answer, content_type="application/json")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "instant", "root": "instant", "max_model_len": 1 << 16}]})

    async def count(_: web.Request) -> web.Response:
        return web.Response(text=str(moved[0]))

    async def life() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", completions)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/bytes", count)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(life())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "plain", "drive", "serve"))
    parser.add_argument("numbers", nargs="*", type=float)
    given = parser.parse_args()
    if given.what == "serve":
        _serve()
    else:
        print(json.dumps({"write": _write, "plain": _plain, "drive": _drive}[given.what](*given.numbers)))
