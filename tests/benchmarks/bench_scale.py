"""What memory and CPU time offline commands take as rollouts grow: 4.6 M tokens × 1, 4 and 16, through the command line.

Run: ``python -m tests.benchmarks scale``, or ``python -m tests.benchmarks.bench_scale WORD …`` for the commands whose names
hold one of these words (what they read is made first); sizes among the words are the only ones that are measured (``4 16
nemo-gym``). ``python -m tests.benchmarks.scale_rows`` measures 10 million rollouts.

Each command is a process of its own. Its peak memory at 16 times the tokens may be at most 1.2 times of that at 4 times. The
trainings' lines are their preparation, which writes what is trained, without a trainer; ``python -m tests.benchmarks
memory`` measures trainings. Left out: ``audit``, whose memory is a model's; ``judge``, which needs a server; documents of
one JSON value (``.json``), which are read and written whole.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tests.benchmarks.bench_experience import write_run
from tests.benchmarks.rows import Row

SIZES = (1, 4, 16)
ROLLOUTS = 12_500
GROWS_AT_MOST = 1.2

_AVERAGES = "SELECT~task_id,~avg(reward)~FROM~rollouts~GROUP~BY~1~LIMIT~5"
_SORTED = "SELECT~rollout_id,~reward~FROM~rollouts~ORDER~BY~reward,~rollout_id"
_OF_TURNS = "SELECT~finish_reason,~count(*),~avg(len(generation_token_ids))~FROM~turns~GROUP~BY~1"
#: {run} is the run, {text} a quarter of its rollouts without ids, {here} the folder of all; {out} is the folder that the
#: command writes to, and {name} that of another command. A space between two words is one of the command line, a tilde one
#: within a word.
COMMANDS = {
    "ls": "ls {run}",
    "show": "show {run}",
    "view --export": "view {run} --export {out}/page.html",
    "query, averages": f"query {{run}} {_AVERAGES}",
    "query, sorted to a file": f"query {{run}} {_SORTED} -o {{out}}/made.parquet",
    "query, tokens of turns": f"query {{run}} {_OF_TURNS}",
    "validate": "validate {run}",
    "validate --fix": "validate {run} --fix drop -o {out}/made.parquet",
    "score": "score {run} --reward {here}/length.py:length --name length",
    "report": "report {run} -o {out}/page.html",
    "report of two": "report {run} {run} -o {out}/page.html",
    "tokenize": "tokenize {text} --tokenizer {tokenizer} -o {out}/made.parquet",
    "filter --where": "filter {run} -o {out}/made --where reward>0.2",
    "filter --dedupe": "filter {run} -o {out}/made --dedupe",
    "filter --best-n --balance": "filter {run} -o {out}/made --best-n 4 --balance reward",
    "filter --split-by": "filter {run} -o {out}/made --split-by task --test-share 0.5",
    "filter of two": (
        "filter {filter --split-by}/made/train.parquet {filter --split-by}/made/test.parquet -o {out}/made"
    ),
    "pairs best-worst": "pairs {run} -o {out}/made",
    "pairs all, at most 4 a task": "pairs {run} -o {out}/made --strategy all --max-pairs-per-task 4",
    "pairs adjacent, forked": "pairs {run} -o {out}/made --strategy adjacent --fork",
    "validate pairs": "validate {pairs best-worst}/made",
    "experience grpo": "experience {run} -o {out}/made",
    "experience rloo, whitened": "experience {run} -o {out}/made --estimator rloo --gamma 0.99 --whiten",
    "experience otb": "experience {run} -o {out}/made --estimator otb",
    "experience gigpo": "experience {run} -o {out}/made --estimator gigpo",
    "experience maxrl": "experience {run} -o {out}/made --estimator maxrl",
    "experience reinforce": "experience {run} -o {out}/made --estimator reinforce --gamma 0.99 --reward-norm std",
    "preparation of train-sft": "prepare~sft {run} {out}/data",
    "preparation of train-kto": "prepare~kto {run} {out}/data",
    "preparation of train-dpo": "prepare~dpo {pairs best-worst}/made {out}/data",
    "preparation of train-reward": "prepare~reward {pairs best-worst}/made {out}/data",
    "preparation of train-rl": "prepare~rl {experience grpo}/made {out}/data",
    "preparation of train-value": "prepare~value {experience rloo, whitened}/made {out}/data",
    "export trl-messages": "export {run} -o {out}/made.jsonl --format trl-messages",
    "export trl-preference": "export {pairs best-worst}/made -o {out}/made.jsonl --format trl-preference",
    "export openai": "export {run} -o {out}/made.jsonl --format openai",
    "export verl": "export {run} -o {out}/made.parquet --format verl",
    "export nemo-gym": "export {run} -o {out}/made.jsonl --format nemo-gym",
    "export nat-trajectories": "export {run} -o {out}/made.jsonl --format nat-trajectories",
    "export nat-dpo": "export {pairs best-worst}/made -o {out}/made.jsonl --format nat-dpo",
    "export atif": "export {run} -o {out}/made.jsonl --format atif",
    "validate nemo-gym": "validate {export nemo-gym}/made.jsonl",
    "import nemo-gym": "import {export nemo-gym}/made.jsonl -o {out}/run",
    "import nat-trajectories": "import {export nat-trajectories}/made.jsonl -o {out}/run",
    "import nat-dpo": "import {export nat-dpo}/made.jsonl -o {out}/run",
    "import atif": "import {export atif}/made.jsonl -o {out}/run",
}
#: Runs a command of the command line, or prepares what is trained, and prints the peak of this process alone: what
#: ``getrusage`` knows of a fresh process includes the one that it was forked from.
_CHILD = """
import re, sys
from pathlib import Path
if sys.argv[1].startswith("prepare "):
    from gymdata.commands.train.prepared import prepare
    from gymdata.commands.train.settings import TRAINERS
    choice = {"sft": {"select": "all"}, "kto": {}}.get(name := sys.argv[1].split()[1], {})
    config = TRAINERS[name].load(overrides={"model": "-", "output": "-", **choice})
    prepare(Path(sys.argv[3]), config.parts(sys.argv[2]))
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


def main(names: Collection[str] = tuple(COMMANDS), sizes: Sequence[int] = SIZES) -> list[Row]:
    costs: dict[str, dict[int, Cost]] = {name: {} for name in names}
    tokens: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="gymdata-bench-") as scratch:
        for size in sizes:
            here = Path(scratch, str(size))
            run = write_run(here / "run", size * ROLLOUTS)
            tokens[size] = tokens_of(run)
            if any("{text}" in COMMANDS[name] for name in names):
                write_run(here / "text", size * ROLLOUTS // 4, texts=True)
            for name, cost in measured_all(needed(names), here):
                print(f"{name}, {tokens[size] / 1e6:.1f} M tokens: {cost}", file=sys.stderr, flush=True)
                if name in costs:
                    costs[name][size] = cost
            shutil.rmtree(here)
    return [_row(what, of, tokens) for what, of in costs.items()]


def needed(names: Collection[str]) -> list[str]:
    """``names`` and the commands whose output they read, in the order of ``COMMANDS``."""
    wanted = set(names)
    for name in reversed(COMMANDS):
        if name in wanted:
            wanted |= {other for other in COMMANDS if _reads(name, other)}
    return [name for name in COMMANDS if name in wanted]


def measured_all(names: Sequence[str], here: Path) -> Iterator[tuple[str, Cost]]:
    """What each of the commands ``names`` costs on ``here``/run; what no later one reads is removed."""
    from gymdata.commands.demo.run import sample_data

    (here / "length.py").write_text("def length(completion, **_):\n    return float(len(str(completion)))\n")
    folders = {name: here / re.sub(r"\W+", "-", name) for name in COMMANDS}
    places = {
        **folders,
        "run": here / "run",
        "text": here / "text",
        "here": here,
        "tokenizer": sample_data() / "policy",
    }
    for at, name in enumerate(names):
        folders[name].mkdir()
        words = COMMANDS[name].format_map({**places, "out": folders[name]}).split()
        yield name, measured([word.replace("~", " ") for word in words])
        for done in names[: at + 1]:
            if not any(_reads(later, done) for later in names[at + 1 :]):
                shutil.rmtree(folders[done], ignore_errors=True)


def _reads(name: str, other: str) -> bool:
    return f"{{{other}}}" in COMMANDS[name]


def measured(words: list[str]) -> Cost:
    """What ``gymdata WORDS`` costs in a fresh process. Raises RuntimeError when it fails."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        shown = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    # 1: some rows have faults, which is a result as well.
    if child.returncode not in (0, 1):
        raise RuntimeError(f"gymdata {' '.join(words)}: {shown[-500:]}")
    peak = next(line for line in reversed(shown.splitlines()) if line.startswith("peak "))
    return Cost(int(peak.split()[1]) / 1024, usage.ru_utime + usage.ru_stime)


def tokens_of(run: Path) -> int:
    """Context and generated tokens of a run."""
    counts = pq.read_table(run / "rollouts", columns=["n_context_tokens", "n_generated_tokens"])
    return sum(int(column.combine_chunks().sum().as_py()) for column in counts.columns)


def _row(what: str, costs: dict[int, Cost], tokens: dict[int, int]) -> Row:
    large, middle, *small = sorted(costs, reverse=True)
    each = {size: f"{cost.cpu_s / tokens[size] * 1e9:.0f} ns" for size, cost in costs.items()}
    ours = f"{costs[large].peak_mb:,.0f} MB and {each[large]} of CPU a token at {tokens[large] / 1e6:.0f} M tokens"
    at = [f"{costs[size].peak_mb:,.0f} MB, {each[size]} at {tokens[size] / 1e6:.3g} M" for size in (middle, *small)]
    ratio = costs[large].peak_mb / costs[middle].peak_mb
    return Row(f"memory of {what}", ours, "; ".join(at), ratio, at_most=GROWS_AT_MOST)


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    sizes = [int(word) for word in sys.argv[1:] if word.isdecimal()] or SIZES
    words = [word for word in sys.argv[1:] if not word.isdecimal()] or [""]
    chosen = [name for name in COMMANDS if any(word in name for word in words)]
    print(markdown(main(chosen, sizes)))
