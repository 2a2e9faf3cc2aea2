"""Writers of rows to a run on an object store, for processes that are forked: ``append URL SPOOL FIRST LAST [WORD…]``.

Words: ``take-over``; ``each``: every row is sealed and sent; ``wait=FIFO``: rows stay in the journal, and the process waits
until the FIFO is closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gymdata.errors import GymdataError
from gymdata.store import Run
from gymdata.store.paths import placed_output
from tests.store.conftest import make_row


def append(url: str, spool: Path, first: int, last: int, *words: str) -> None:
    """Append the rows ``first`` to ``last`` that the run does not have yet."""
    folder = placed_output(url, spool)
    with Run.open(
        folder, identity={"policy": "tiny"}, extent={"rows": last}, operation={}, run_id="run", rows_per_file=2,
        take_over="take-over" in words, seal_every_s=1e-9 if "each" in words else 1e9,
    ) as run:  # fmt: skip
        there = set(run.existing(["rollout_id"])["rollout_id"].to_pylist())
        for index in range(first, last):
            row = make_row(index)
            if row["rollout_id"] not in there:
                run.append(row)
        for word in words:
            if word.startswith("wait="):
                Path(word.removeprefix("wait=")).read_bytes()


def forked(environment: dict[str, str], said: str, function: str, words: Sequence[str]) -> int:
    """``append``, or ``gymdata``, with ``words`` in a process that was forked: what it says goes to a file."""
    os.environ |= environment
    with Path(said).open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if function == "append":
            return main(words)
        from gymdata.cli.main import main as gymdata

        return gymdata(list(words))


def main(words: Sequence[str]) -> int:
    url, spool, first, last, *words = words
    try:
        append(url, Path(spool), int(first), int(last), *words)
    except GymdataError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
