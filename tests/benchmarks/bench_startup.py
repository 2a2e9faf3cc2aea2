"""How fast the command line answers: ``gymdata --help`` as a whole process, against ``python -c pass``."""

from __future__ import annotations

import statistics
import subprocess
import sys

from tests.benchmarks.rows import Row, interleave, seconds


def main() -> list[Row]:
    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    times = interleave(lambda: run("-m", "gymdata.cli", "--help"), lambda: run("-c", "pass"), runs=9)
    median = statistics.median(times.ours)
    return [Row("gymdata --help (seconds)", seconds(times.ours), f"python {seconds(times.rival)}", median, at_most=0.5)]
