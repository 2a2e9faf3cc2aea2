"""How much of the engine's own speed ``collect`` keeps, against bare ``vllm.LLM.generate``.

Same weights, prompts, per-request seeds, SamplingParams (flat log-probabilities, no detokenising, final output only) and
max_num_seqs. Every answer has the same length, so the policy writes past its end of turn; no parser is meant to read that,
and answers are taken as plain text. Each measurement is a process of its own: start, warm up, then the clock
runs. ``collect`` is timed from the first request to the sealed Parquet file, rewards included. The ratio's lower bound is
the 2.5 % point of a bootstrap over pairs of runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.rows import Row, seconds

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
TOKENS, GROUP, SEQS, CONTEXT = 32, 8, 256, 256
#: Rollouts that take about 20 seconds on two cores.
SIZES = {"tiny": 6_400, "larger": 680}
RUNS = 5


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        larger = _larger_model(Path(scratch) / "larger")
        return [
            compare("collect, tiny policy", POLICY, SIZES["tiny"], "ours", 0.85),
            compare("collect, 25 M parameters", larger, SIZES["larger"], "ours", 0.95),
            compare("collect over HTTP, n = 8 a request", POLICY, SIZES["tiny"], "http", 0.75),
        ]


def compare(what: str, model: Path, size: int, ours: str, bound: float) -> Row:
    fast: list[float] = []
    bare: list[float] = []
    with _Server(model) if ours == "http" else _Nothing() as url:
        for _ in range(RUNS):
            bare.append(_measure("rival", model, size, url))
            fast.append(_measure(ours, model, size, url))
    ratios = [b / f for b, f in zip(bare, fast, strict=True)]
    rng = random.Random(0)
    draws = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    median = statistics.median(ratios)
    speed = f"{size * TOKENS / statistics.median(fast):,.0f} tok/s, {seconds(fast)}"
    rival = f"LLM.generate {size * TOKENS / statistics.median(bare):,.0f} tok/s, {seconds(bare)}"
    return Row(
        f"{what} (median {median:.2f}; the bound is on the 2.5 % point)", speed, rival, draws[50], at_least=bound
    )


def _measure(who: str, model: Path, size: int, url: str) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.bench_collect", who, str(model), str(size), "--url", url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(
        f"{who} {model.name}: {result['seconds']:.1f} s, {result['cpu_us_a_row']:.0f} µs of CPU a row here\n"
    )
    return float(result["seconds"])


class _Nothing:
    def __enter__(self) -> str:
        return ""

    def __exit__(self, *_: object) -> None: ...


class _Server:
    """A vLLM server of a model, with the engine settings of the others."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def __enter__(self) -> str:
        from tests.engine_fixtures import _await_health, _free_port, server_command, server_environment

        port = _free_port()
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*server_command(str(self._model), port), "--max-model-len", str(CONTEXT)],
            env=server_environment(), stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        _await_health(self._process, port, self._log)
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        import os

        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(30)


def _larger_model(folder: Path) -> Path:
    """Random weights of about 25 million parameters under the sample policy's tokenizer."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(POLICY)
    config.hidden_size, config.intermediate_size, config.head_dim = 512, 1536, 64
    config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers = 8, 8, 7
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(POLICY / name, folder / name)
    return folder


# --- one measurement, in a process of its own -------------------------------------------------------------------------


def _tasks(folder: Path, size: int) -> Path:
    path = folder / f"tasks-{size}.jsonl"
    rows = [{"task_id": f"t{i}", "prompt": f"What is {i % 900 + 100}+{i // 900 + 100}?", "answer": str(i)}
            for i in range(size // GROUP)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rival(model: Path, size: int, folder: Path) -> tuple[float, float]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from gymdata.chat.template import TransformersChat
    from gymdata.commands.collect.resume import request_seed
    from gymdata.commands.collect.tasks import TaskFile
    from gymdata.engines._vllm import VllmSampler

    chat = TransformersChat.load(str(model))
    prompts: list[Any] = []
    params = []
    for task in TaskFile(_tasks(folder, size)):
        ids = chat.render(task.messages, None)
        for index in range(GROUP):
            prompts.append({"prompt_token_ids": ids})
            params.append(
                SamplingParams(
                    temperature=1.0,
                    max_tokens=TOKENS,
                    ignore_eos=True,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    seed=request_seed(1, task, 0, index),
                )
            )
    # The very engine arguments that collect uses.
    args = VllmSampler(str(model), engine_args=_ENGINE)._engine_args()
    wanted = {k: getattr(args, k) for k in ("dtype", "enforce_eager", "enable_chunked_prefill", "max_num_seqs",
              "max_num_batched_tokens", "max_model_len", "logprobs_mode", "seed")}  # fmt: skip
    llm = LLM(model=str(model), disable_log_stats=True, **wanted)
    llm.generate(prompts[:_WARM], params[:_WARM], use_tqdm=False)
    began, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == size * TOKENS
    return spent, cpu


_ENGINE = {"max_num_seqs": SEQS, "max_model_len": CONTEXT}
_WARM = 2_000


class _Warmed:
    """A Sampler whose start includes a warm-up, and which knows how long starting took, and when it stopped."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.prefers_groups = inner.prefers_groups
        self.default_concurrency = inner.default_concurrency
        self.overhead_s = self.overhead_cpu_s = self.stopping_s = self.stopped_s = 0.0

    async def start(self) -> Mapping[str, Any]:
        from gymdata.engines.port import SampleRequest

        began, cpu = time.perf_counter(), time.process_time()
        facts = await self._inner.start()
        ids = list(range(5, 29))
        n = GROUP if self.prefers_groups else 1
        waiting = iter([SampleRequest(f"warm-{i}", ids, TOKENS, seed=i, n=n) for i in range(_WARM // n)])

        async def worker() -> None:
            for request in waiting:
                await self._inner.sample(request)

        await asyncio.gather(*(worker() for _ in range(SEQS // n)))
        self.overhead_s += time.perf_counter() - began
        self.overhead_cpu_s += time.process_time() - cpu
        return facts  # type: ignore[no-any-return]  # from an untyped base

    async def sample(self, request: Any) -> Any:
        return await self._inner.sample(request)

    async def close(self) -> None:
        cpu, self.stopping_s = time.process_time(), time.perf_counter()
        await self._inner.close()
        self.stopped_s = time.perf_counter()
        self.overhead_cpu_s += time.process_time() - cpu


def _ours(model: Path, size: int, folder: Path, url: str) -> tuple[float, float]:
    from gymdata.chat.template import TransformersChat
    from gymdata.commands.collect.run import Parts, collect
    from gymdata.engines._vllm import VllmSampler
    from gymdata.engines.servers.vllm_server import ServerSampler
    from gymdata.environments import load_environment
    from gymdata.rewards import load_rewards
    from gymdata.rewards.scheduler import Weighted

    sampling = {"temperature": 1.0, "ignore_eos": True}
    inner: Any
    if url:
        inner = ServerSampler(url, "sample-policy", sampling=sampling)
    else:
        inner = VllmSampler(str(model), sampling=sampling, engine_args=_ENGINE, seed=0)
    sampler = _Warmed(inner)
    rewards = [Weighted(function, weight) for function, weight in load_rewards(["numeric"])]
    parts = Parts(sampler, TransformersChat.load(str(model), tool_parser="none"), load_environment(None), rewards,
                  {"policy": str(model), "policy_hash": "bench"})  # fmt: skip
    tasks = str(_tasks(folder, size))
    began, cpu = time.perf_counter(), time.process_time()
    summary = collect(tasks=tasks, output=folder / "run", num_rollouts=GROUP, max_tokens=TOKENS, seed=1, parts=parts)
    spent = time.perf_counter() - began - sampler.overhead_s
    # The last rows are sealed while the engine stops; of that time only what comes after them is not counted.
    ago = time.time() - max(file.stat().st_ctime for file in folder.rglob("rollouts/*.parquet"))
    spent -= max(0.0, sampler.stopped_s - max(sampler.stopping_s, time.perf_counter() - ago))
    cpu = time.process_time() - cpu - sampler.overhead_cpu_s
    assert summary.tokens_generated == size * TOKENS
    return spent, cpu


def _worker(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=("ours", "rival", "http"))
    parser.add_argument("model", type=Path)
    parser.add_argument("size", type=int)
    parser.add_argument("--url", default="")
    given = parser.parse_args(arguments)
    from gymdata.engines._vllm import set_environment

    set_environment()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.who == "rival":
            spent, cpu = _rival(given.model, given.size, folder)
        else:
            spent, cpu = _ours(given.model, given.size, folder, given.url if given.who == "http" else "")
    print(json.dumps({"seconds": spent, "cpu_us_a_row": 1e6 * cpu / given.size}))


if __name__ == "__main__":
    _worker(sys.argv[1:])
    sys.stdout.flush()
    # Shutting a bare LLM down, and multiprocessing at exit, have stood still. The engine ends with this process.
    os._exit(0)
