"""How fast NeMo Gym rollouts are imported: CPU seconds of one core, against ``json.loads`` of the same lines.

Run: ``python -m tests.benchmarks import``. The bound is 40 MB/s of source a core, which a loaded machine does not change,
for CPU time is counted and not the clock.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path

from gymdata.interop.run import import_rollouts
from tests.benchmarks.bench_validate import write_nemo
from tests.benchmarks.rows import Row, interleave, seconds

MEGABYTES = 60
AT_LEAST_MB_S = 40


def main() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="gymdata-bench-"))
    try:
        source = folder / "rollouts.jsonl"
        write_nemo(source, MEGABYTES)
        size = source.stat().st_size / 1e6

        def ours() -> object:
            return import_rollouts(source, folder / "run", overwrite=True)

        def rival() -> object:
            with source.open("rb") as file:
                return sum(len(json.loads(line)["response"]["output"]) for line in file)

        timing = interleave(ours, rival)
        speed = size / statistics.median(timing.ours_cpu)
        return [
            Row(
                f"import {size:.0f} MB to a run, MB/s of CPU time (ratio: to {AT_LEAST_MB_S} MB/s)",
                f"{speed:.0f} MB/s, {seconds(timing.ours_cpu)}",
                f"json.loads {size / statistics.median(timing.rival_cpu):.0f} MB/s, {seconds(timing.rival_cpu)}",
                speed / AT_LEAST_MB_S,
                at_least=1.0,
            )
        ]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    print(markdown(main()))
