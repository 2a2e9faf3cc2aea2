"""``make bench``: every benchmark's table, as ratios against a named rival in the same run, written to RESULTS.md.

``python -m tests.benchmarks [-o FILE] [NAME …]`` runs the named ones, or all. Each module ``bench_NAME.py`` has
``main() -> list[Row]``; a row that misses its bound makes the command fail. Warm up, then rival and ours in turn, five
runs or more, medians.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import platform
import shlex
import sys
import time
from pathlib import Path

from tests.benchmarks.rows import Row, markdown

HEAD = """# Benchmark results

Ratios against a named rival in the same run, medians, written by `{command}`.

{machine}

"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the table to a Markdown file")
    given = parser.parse_args(argv)
    names = given.names
    found = sorted(f.stem.removeprefix("bench_") for f in Path(__file__).parent.glob("bench_*.py"))
    unknown = set(names) - set(found)
    if unknown:
        sys.stderr.write(f"error: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(found)}\n")
        return 2
    # Commands start as they do when they are installed: compiled, whatever this shell says.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(__file__).parents[2] / "gymdata", quiet=1)
    rows: list[Row] = []
    for name in names or found:
        began = time.monotonic()
        fresh = importlib.import_module(f"tests.benchmarks.bench_{name}").main()
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n{markdown(fresh)}\n")
        rows += fresh
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"{machine}\n")
    print(markdown(rows))
    if given.output is not None:
        command = shlex.join(["python", "-m", "tests.benchmarks", *argv])
        given.output.write_text(HEAD.format(command=command, machine=machine) + markdown(rows) + "\n", encoding="utf-8")
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
