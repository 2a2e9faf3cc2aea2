"""Pieces of work in several processes: order, errors, and ends of every kind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymdata.errors import OutsideError, RefusedError, UsageError
from gymdata.store.reading import reading
from gymdata.workers.processes import in_order
from tests.workers.inputs import dies_at_three, divides, negative, refuses_three, waits_for_ever

WAITING = """
from tests.workers.inputs import waits_for_ever
from gymdata.workers.processes import in_order
try:
    list(in_order(waits_for_ever, [1, 2, 3, 4], 2, str))
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def children() -> list[int]:
    """Processes that this one started and that have not ended."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            pids += map(int, (task / "children").read_text().split())
    return pids


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_pieces(workers: int) -> None:
    """However many processes there are, result k is that of piece k, and none is missing."""
    assert list(in_order(negative, range(50), workers, str)) == [-k for k in range(50)]


def test_processes_that_another_thread_began_go_on() -> None:
    """Ending its own workers ends no others of this process."""
    done = in_order(negative, range(50), 2, str)
    assert next(done) == 0
    other = multiprocessing.get_context("spawn").Process(target=waits_for_ever, args=(1,))
    other.start()
    done.close()
    assert other.is_alive()
    other.kill()
    other.join()


def test_few_pieces_are_under_way_at_a_time() -> None:
    """Pieces are made as they are worked on: memory does not grow with their number."""
    pulled = []

    def pieces() -> Iterator[int]:
        for k in range(1_000_000):
            pulled.append(k)
            yield k

    done = in_order(negative, pieces(), 2, str)
    assert [next(done) for _ in range(3)] == [0, -1, -2]
    done.close()
    assert len(pulled) <= 8


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_and_what_was_reported_come_in_their_places(workers: int) -> None:
    """The pieces before the fault are given, the lines of each with it, and the error is whole: class, code, hint, parts."""
    lines: list[str] = []
    with reading(report=lines.append) as found:
        done = in_order(refuses_three, [1, 2, 3, 4], workers, str)
        assert [next(done), next(done)] == [1, 2]
        assert lines == ["piece 1 is odd", "piece 2 is odd"]
        with pytest.raises(RefusedError) as caught:
            next(done)
    assert lines[2:] == ["piece 3 is odd", "piece 3 is damaged"]
    assert found.damage == ["piece 3 is damaged"]
    error = caught.value
    assert (str(error), error.code, error.where, error.got, error.expected, error.exit_code) == (
        "T205: nothing\n  → another",
        "T205",
        "here",
        "3",
        "a turn",
        1,
    )


def test_a_defect_says_where_it_was() -> None:
    """What Python raises in a worker is raised again, with the lines of the worker beside it."""
    with pytest.raises(ZeroDivisionError) as caught:
        list(in_order(divides, [1, 0], 2, str))
    assert "yield 1 / piece" in str(caught.value.__cause__)


def test_a_worker_that_is_killed_is_an_error_that_names_its_piece() -> None:
    """Nothing is left out in silence, and the exit code says that the system was at fault."""
    done = in_order(dies_at_three, [1, 2, 3, 4], 2, lambda piece: f"piece {piece}")
    assert [next(done), next(done)] == [1, 2]
    with pytest.raises(OutsideError, match=r"worker: a process was killed .* piece 3.* memory") as caught:
        next(done)
    assert (caught.value.exit_code, caught.value.hint) == (3, "give fewer workers=")


def test_a_caller_that_stops_leaves_no_process() -> None:
    """Workers end with the loop over their results, wherever it ends."""
    before = children()
    done = in_order(negative, range(100), 2, str)
    next(done)
    assert len(children()) > len(before)
    done.close()
    assert children() == before


def test_fewer_than_one_worker_is_refused() -> None:
    """0 does not mean all cores, and says so."""
    with pytest.raises(UsageError, match="workers: got 0, expected at least 1"):
        next(in_order(negative, [1], 0, str))


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_no_worker_outlives_its_parent(how: str) -> None:
    """After a Ctrl-C, which a terminal sends to the whole group, and after SIGKILL, which no process can answer, nothing is
    left; after a Ctrl-C the workers say nothing of it."""
    parent = subprocess.Popen([sys.executable, "-c", WAITING], stderr=subprocess.PIPE, process_group=0)
    assert parent.stderr is not None
    workers = [int(parent.stderr.readline().split()[1]) for _ in range(2)]
    held = [os.pidfd_open(pid) for pid in workers]
    if how == "killed":
        parent.kill()
    else:
        os.killpg(parent.pid, signal.SIGINT)
    code = parent.wait(60)
    for one in held:
        assert select.select([one], [], [], 60)[0]
        os.close(one)
    with parent.stderr as rest:
        # After SIGKILL, Python's tracker of semaphores says that it cleaned up.
        assert how == "killed" or rest.read() == b""
    assert code == (130 if how == "interrupted" else -signal.SIGKILL)
