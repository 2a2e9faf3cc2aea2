"""``make bench``: every benchmark's table, as ratios against a named rival in the same run.

``python -m tests.benchmarks [NAME …]`` runs the named ones. Each module ``bench_NAME.py`` has ``main() -> list[Row]``; a
row that misses its bound makes the command fail. Warm up, then rival and ours in turn, five runs or more, medians.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from pathlib import Path

from tests.benchmarks.rows import Row, markdown


def main(names: list[str]) -> int:
    found = sorted(f.stem.removeprefix("bench_") for f in Path(__file__).parent.glob("bench_*.py"))
    unknown = set(names) - set(found)
    if unknown:
        sys.stderr.write(f"error: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(found)}\n")
        return 2
    rows: list[Row] = []
    for name in names or found:
        began = time.monotonic()
        fresh = importlib.import_module(f"tests.benchmarks.bench_{name}").main()
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n{markdown(fresh)}\n")
        rows += fresh
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    print(markdown(rows))
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
