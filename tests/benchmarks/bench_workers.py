"""What a second process gives the offline stages: ``--workers 2`` against one, wall time of whole commands.

Run on a machine with two cores at rest: ``python -m tests.benchmarks workers``. Starting Python is counted, in the command
and in its workers. ``experience`` and ``pairs`` have no bound: writing their one file is a large part of their time, and one
process writes it, in ``experience`` beside the rest already.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gymdata.interop.run import import_rollouts
from tests.benchmarks.bench_experience import write_run
from tests.benchmarks.bench_validate import write_nemo
from tests.benchmarks.rows import Row, interleave, seconds

AT_LEAST = 1.4
#: Files below 24 MB: one worker alone scans larger ones in two processes.
FILES, MEGABYTES = 20, 20
ROLLOUTS = 100_000
TIMES = 5


def row(what: str, *words: str | Path, output: Path | None = None, at_least: float | None = AT_LEAST) -> Row:
    """``output``: is removed before each run."""

    def command(workers: int) -> None:
        if output is not None:
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
        line = [sys.executable, "-m", "gymdata.cli", *map(str, words), "--workers", str(workers)]
        done = subprocess.run(line, capture_output=True, check=False)
        # 1: rows with faults, which planted data may have.
        assert done.returncode in (0, 1), done.stderr

    timing = interleave(lambda: command(2), lambda: command(1), TIMES)
    ours, rival = seconds(timing.ours), f"--workers 1: {seconds(timing.rival)}"
    return Row(f"{what}, --workers 2", ours, rival, timing.speedup, at_least=at_least)


def main() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="gymdata-bench-"))
    try:
        files = [folder / f"gym-{k}.jsonl" for k in range(FILES)]
        for file in files:
            write_nemo(file, MEGABYTES)
        size = sum(file.stat().st_size for file in files) / 1e6
        import_rollouts(files, folder / "imported")
        run, out = write_run(folder / "run", ROLLOUTS), folder / "out"
        export = ("export", folder / "imported", "--format", "nemo-gym", "-o", out / "rows.jsonl")
        return [
            row(f"validate {FILES} NeMo Gym files, {size:.0f} MB", "validate", folder / "gym-*.jsonl"),
            row(f"import of the {size:.0f} MB", "import", *files, "-o", out / "run", output=out),
            row(f"export of the {size:.0f} MB", *export, output=out),
            row(f"pairs of {ROLLOUTS:,} rollouts", "pairs", run, "-o", out / "pairs", output=out, at_least=None),
            row(f"experience of {ROLLOUTS:,} rollouts", "experience", run, "-o", out / "e", output=out, at_least=None),
        ]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    print(markdown(main()))
