"""What memory and CPU time offline commands take as rollouts grow: 4.6 M tokens × 1, 4 and 16, through the command line.

Run: ``python -m tests.benchmarks scale``. Each command is a process of its own. Its peak memory at 16 times the tokens may
be at most 1.2 times of that at 4 times. NeMo Gym's and TRL's formats are written and the former read; SFT data is what
``train-sft`` prepares, without a trainer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tests.benchmarks.bench_experience import write_run
from tests.benchmarks.rows import Row

SIZES = (1, 4, 16)
ROLLOUTS = 12_500
GROWS_AT_MOST = 1.2

#: {run} is the run, {out} a path that is not there yet, {gym} what "export nemo-gym" wrote, {here} the folder of all.
COMMANDS = {
    "validate": "validate {run}",
    "query": "query {run} SELECT~task_id,~avg(reward)~FROM~rollouts~GROUP~BY~1~LIMIT~5",
    "filter --where": "filter {run} -o {out}.parquet --where reward>0.2",
    "filter --dedupe": "filter {run} -o {out}.parquet --dedupe",
    "score": "score {run} --reward {here}/length.py:length --name length",
    "experience grpo": "experience {run} -o {out}.parquet",
    "experience rloo, whitened": "experience {run} -o {out}.parquet --estimator rloo --gamma 0.99 --whiten",
    "pairs best-worst": "pairs {run} -o {out}.parquet",
    "pairs all, at most 4 a task": "pairs {run} -o {out}.parquet --strategy all --max-pairs-per-task 4",
    "read for SFT": "read~for~SFT {run}",
    "report": "report {run} -o {out}.html",
    "export trl-messages": "export {run} -o {out}.jsonl --format trl-messages",
    "export nemo-gym": "export {run} -o {gym} --format nemo-gym",
    "import nemo-gym": "import {gym} -o {out}",
}
#: Runs a command of the command line, or reads a run for SFT, and prints the peak of this process alone: what ``getrusage``
#: knows of a fresh process includes the one that it was forked from.
_CHILD = """
import re, sys
from pathlib import Path
if sys.argv[1] == "read for SFT":
    from gymdata.store import read_table
    from gymdata.train.settings import TrainSftConfig
    from gymdata.rollouts.schema import ROLLOUTS
    config = TrainSftConfig.load(overrides={"model": "-", "output": "-"})
    config.prepare(read_table(sys.argv[2], ROLLOUTS, columns=config.columns), sys.argv[2])
    code = 0
else:
    from gymdata.cli.main import main
    code = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(f"peak {peak[1]}", file=sys.stderr, flush=True)
sys.exit(code)
"""


@dataclass(frozen=True)
class Cost:
    """Of one process: peak resident memory in MB, and CPU seconds of all its threads."""

    peak_mb: float
    cpu_s: float


def main() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="gymdata-bench-") as scratch:
        here = Path(scratch)
        (here / "length.py").write_text("def length(completion, **_):\n    return float(len(str(completion)))\n")
        runs = {size: write_run(here / f"run-{size}", size * ROLLOUTS) for size in SIZES}
        tokens = {size: _tokens(run) for size, run in runs.items()}
        costs: dict[str, dict[int, Cost]] = {}
        for size, run in runs.items():
            names = {"run": run, "here": here, "gym": here / f"gym-{size}.jsonl"}
            for at, (what, command) in enumerate(COMMANDS.items()):
                words = [w.replace("~", " ") for w in command.format(**names, out=here / f"out-{size}-{at}").split()]
                costs.setdefault(what, {})[size] = measured(words)
        return [_row(what, of, tokens) for what, of in costs.items()]


def measured(words: list[str]) -> Cost:
    """What ``gymdata WORDS`` costs in a fresh process. Raises RuntimeError when it fails."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        shown = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"gymdata {' '.join(words)}: {shown[-500:]}")
    peak = next(line for line in reversed(shown.splitlines()) if line.startswith("peak "))
    return Cost(int(peak.split()[1]) / 1024, usage.ru_utime + usage.ru_stime)


def _tokens(run: Path) -> int:
    """Context and generated tokens of a run."""
    counts = pq.read_table(run / "rollouts", columns=["n_context_tokens", "n_generated_tokens"])
    return sum(int(column.combine_chunks().sum().as_py()) for column in counts.columns)


def _row(what: str, costs: dict[int, Cost], tokens: dict[int, int]) -> Row:
    small, middle, large = (costs[size] for size in SIZES)
    each = {size: cost.cpu_s / tokens[size] * 1e9 for size, cost in costs.items()}
    ours = f"{large.peak_mb:,.0f} MB and {each[16]:.0f} ns of CPU a token at {tokens[16] / 1e6:.0f} M tokens"
    at_4 = f"{middle.peak_mb:,.0f} MB, {each[4]:.0f} ns at {tokens[4] / 1e6:.0f} M"
    rival = f"{at_4}; {small.peak_mb:,.0f} MB, {each[1]:.0f} ns at {tokens[1] / 1e6:.1f} M"
    return Row(f"memory of {what}", ours, rival, large.peak_mb / middle.peak_mb, at_most=GROWS_AT_MOST)


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    print(markdown(main()))
