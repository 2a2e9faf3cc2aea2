"""How a statement ends that nobody waits for, or that needs more memory than there is."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "sample_data" / "rollouts" / "clean.jsonl"
#: No first row for hours, rows that no one reads, and one row after hours; and the file of the result.
ENDLESS = [
    ("select a.range + b.range from range(100000000000) a, range(1000) b where a.range + b.range < 0", "x.parquet"),
    ("select a.range + b.range from range(100000000000) a, range(1000) b", "x.jsonl"),
    ("select count(*) from range(100000000000) a, range(1000) b", "x.parquet"),
]


@pytest.mark.parametrize(("sql", "file"), ENDLESS)
def test_a_statement_is_interrupted(tmp_path: Path, sql: str, file: str) -> None:
    """Ctrl-C ends the command at once, with nothing left of the result or in the temporary folder."""
    # The command says when its SQL begins.
    program = (
        "import sys; from gymdata.cli.main import main; from gymdata.commands.query import statement\n"
        "pool = statement.ThreadPoolExecutor\n"
        "statement.ThreadPoolExecutor = lambda *given: (print('begun', file=sys.__stdout__, flush=True), pool(*given))[1]\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "query", sql, str(RUN), "-o", file],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sql", ["select list(range) from range(2000000000)", "select list_sum(range(500000000::bigint))"]
)
def test_a_statement_over_the_memory_is_an_error(sql: str) -> None:
    """Buffers and single values that are too large end the command with an error about memory, not with a signal, and do
    not call the file damaged."""
    words = [sys.executable, "-m", "gymdata", "query", sql, str(RUN)]
    line = f"ulimit -v 3000000; exec {shlex.join(words)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "error: out of memory" in done.stderr
    assert "defect" not in done.stderr
    assert "cut off" not in done.stderr
