"""How busy ``judge`` keeps the engine, against bare ``vllm.LLM.generate`` of the same prompts.

The sample judge compares rollouts in groups of 8, both orders, shown as transcripts. Same weights, rendered prompts,
SamplingParams (flat log-probabilities, no detokenising, final output only; the seeds are other numbers) and engine settings;
both write verdicts until their end token, so the number of tokens agrees within a hundredth. Each measurement is a
process of its own: start, warm up, then the clock runs; ``judge`` is timed from reading the rollouts to the written
comparisons, rewards and bias report, verdicts parsed and kept on the way. The ratio is of tokens a second; its lower bound
is the 2.5 % point of a bootstrap over pairs of runs.
"""

from __future__ import annotations

import argparse
import json
import random
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
JUDGE = ROOT / "sample_data" / "genrm"
GROUP, SEQS, CONTEXT, MAX_TOKENS = 8, 256, 512, 64
#: Groups of 56 comparisons that take about 20 seconds on two cores.
GROUPS = 200
RUNS = 5
_ENGINE = {"max_num_seqs": SEQS, "max_model_len": CONTEXT}
_WARM = 1_000


def main(groups: int = GROUPS) -> list[Row]:
    ours: list[dict[str, float]] = []
    bare: list[dict[str, float]] = []
    for _ in range(RUNS):
        bare.append(_measure("rival", groups))
        ours.append(_measure("ours", groups))
    if abs(_tokens(ours) / _tokens(bare) - 1) > 0.01:
        raise AssertionError(f"not the same work: {_tokens(ours):.0f} tokens against {_tokens(bare):.0f}")
    ratios = [_speed(o) / _speed(b) for o, b in zip(ours, bare, strict=True)]
    rng = random.Random(0)
    draws = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    comparisons = groups * GROUP * (GROUP - 1)
    return [
        Row(
            f"judge, tiny judge, {comparisons:,} comparisons (median {statistics.median(ratios):.2f}; the bound is on the "
            "2.5 % point)",
            f"{statistics.median(map(_speed, ours)):,.0f} tok/s, {seconds([r['seconds'] for r in ours])}",
            f"LLM.generate {statistics.median(map(_speed, bare)):,.0f} tok/s, {seconds([r['seconds'] for r in bare])}",
            draws[50],
            at_least=0.85,
        )
    ]


def _tokens(runs: Sequence[Mapping[str, float]]) -> float:
    return statistics.mean(run["tokens"] for run in runs)


def _speed(run: Mapping[str, float]) -> float:
    return run["tokens"] / run["seconds"]


def _measure(who: str, groups: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_judge", who, str(groups)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"{who}: {result['seconds']:.1f} s, {result['tokens']:,.0f} tokens\n")
    return result


# --- one measurement, in a process of its own -------------------------------------------------------------------------


def _run_folder(folder: Path, groups: int) -> Path:
    """Rollouts of the kind that the judge knows, right and wrong."""
    from gymdata.sample_data.genrm_comparisons import draw_response
    from gymdata.sample_data.make_tasks import OPERATORS, WORDINGS, draw_operands
    from tests.rollout_files import rollout, two_turns, write_run

    draw, rows = random.Random(0), []
    for number in range(groups):
        operator, wording = draw.choice(OPERATORS), draw.choice(WORDINGS)
        left, right = draw_operands(operator, draw)
        question = {"role": "user", "content": wording.format(f"{left}{operator}{right}")}
        for index in range(GROUP):
            said = draw_response(left, operator, right, wording, draw).messages
            rows.append(rollout(f"t{number:05}", index, 0.0, two_turns(1, 40), messages=[question, *said]))
    return write_run(folder / "run", rows)


def _judge() -> Any:
    from gymdata.commands.judge._vllm import EngineJudge

    return EngineJudge(str(JUDGE), max_tokens=MAX_TOKENS, engine_args=_ENGINE, seed=0)


def _rival(run: Path) -> tuple[float, int]:
    from vllm import LLM

    from gymdata.commands.judge.groups import COLUMNS, group_comparisons
    from gymdata.engines.port import SampleRequest
    from gymdata.genrm import schedule
    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.store import read_table

    judge = _judge()
    prompts: list[Any] = []
    for comparison in group_comparisons(read_table(run, ROLLOUTS, COLUMNS), "transcript", None).comparisons:
        for match in schedule("both_orders", len(comparison.candidates)):
            one, two = (comparison.candidates[i].answer for i in match[:2])
            messages = judge.form.messages(comparison.conversation, one, two, None)
            prompts.append({"prompt_token_ids": judge.chat.render(messages, None)})
    # The very engine arguments and SamplingParams that judge uses.
    judge.sampler._facts = {"request_seeds": True}
    params = [judge.sampler._params(SampleRequest("", [], MAX_TOKENS, seed)) for seed in range(len(prompts))]
    args = judge.sampler._engine_args()
    wanted = {k: getattr(args, k) for k in ("dtype", "enforce_eager", "enable_chunked_prefill", "max_num_seqs",
              "max_num_batched_tokens", "max_model_len", "logprobs_mode", "seed")}  # fmt: skip
    llm = LLM(model=str(JUDGE), disable_log_stats=True, **wanted)
    llm.generate(prompts[-_WARM:], params[-_WARM:], use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    spent = time.perf_counter() - began
    # A cycle may keep the LLM alive until exit, where multiprocessing waits for an engine that nobody told to stop.
    llm.llm_engine.engine_core.shutdown()
    return spent, sum(len(o.outputs[0].token_ids) for o in outputs)


class _Warmed:
    """A Judge whose start includes a warm-up, and which knows how long starting and stopping took."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.identity = inner.identity
        self.default_concurrency = inner.default_concurrency
        self.overhead_s = 0.0
        self.tokens = 0

    async def start(self) -> Mapping[str, Any]:
        import asyncio

        began = time.perf_counter()
        facts: Mapping[str, Any] = await self._inner.start()
        question = [{"role": "user", "content": "What is 417-58?"}]
        waiting = iter(range(_WARM))

        async def worker() -> None:
            for seed in waiting:
                await self._inner.compare(question, "359", "58", None, seed)

        await asyncio.gather(*(worker() for _ in range(SEQS)))
        self.overhead_s += time.perf_counter() - began
        return facts

    async def compare(self, *question: Any) -> Any:
        answer = await self._inner.compare(*question)
        self.tokens += answer.usage["completion_tokens"]
        return answer

    async def close(self) -> None:
        began = time.perf_counter()
        await self._inner.close()
        self.overhead_s += time.perf_counter() - began


def _ours(run: Path) -> tuple[float, int]:
    from gymdata.commands.judge.run import judge

    warmed = _Warmed(_judge())
    began = time.perf_counter()
    # The rival asks nobody again either.
    summary = judge(path=str(run), show="transcript", genrm_parse_retries=0, output=run / "judge-genrm", judge=warmed)
    spent = time.perf_counter() - began - warmed.overhead_s
    assert summary.asked == sum(summary.comparisons.values())
    assert summary.comparisons["judged"] > 0.98 * summary.asked
    return spent, warmed.tokens


def _worker(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=("ours", "rival"))
    parser.add_argument("groups", type=int)
    given = parser.parse_args(arguments)
    from gymdata.engines._vllm import set_environment

    set_environment(str(JUDGE))
    with tempfile.TemporaryDirectory() as scratch:
        run = _run_folder(Path(scratch), given.groups)
        spent, tokens = _ours(run) if given.who == "ours" else _rival(run)
    print(json.dumps({"seconds": spent, "tokens": tokens}))


if __name__ == "__main__":
    _worker(sys.argv[1:])
