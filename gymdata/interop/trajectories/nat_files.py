"""Files of NeMo Agent Toolkit trajectories: ``.json`` holds a ``TrajectoryCollection``, ``.jsonl`` a trajectory a line.

Invariants: the trajectories of one example lie in one inner list, in the order in which examples first appear; a
whole import goes back into the documents and lists that it came from. Memory does not grow with the rollouts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from gymdata.interop.trajectories.nat_read import GONE

#: What a trajectory is written from: its group, its run, itself.
Made = tuple[str, str, Mapping[str, Any]]


def write(made: Iterable[Made], path: Path, *, lines: bool, shapes: Sequence[Any] | None = None) -> int:
    """Write trajectories; returns how many. ``shapes``: those of the documents that all of them came from."""
    groups: list[str] = []
    runs: set[str] = set()
    with tempfile.TemporaryFile() as spill, path.open("wb") as out:
        ends = [0]
        for group, run, trajectory in made:
            spill.write(json.dumps(trajectory, ensure_ascii=False).encode())
            ends.append(spill.tell())
            groups.append(group)
            runs.add(run)
        one = _Reader(spill, ends)
        known = [shape for shape in shapes or () if shape["kind"] != "bad"]
        if sum(map(_count, known)) != len(groups):
            known = []
        if known and (lines or len(known) == 1):
            _restore(known, one, out)
        elif lines:
            out.writelines(one(k) + b"\n" for k in range(len(groups)))
        else:
            numbers: dict[str, list[int]] = {}
            for number, group in enumerate(groups):
                numbers.setdefault(group, []).append(number)
            _collection({"trajectories": None, "run_id": ", ".join(sorted(runs))}, numbers.values(), one, out)
    return len(groups)


class _Reader:
    """Trajectories that were written aside, by number."""

    def __init__(self, spill: IO[bytes], ends: Sequence[int]) -> None:
        self._spill, self._ends = spill, ends

    def __call__(self, number: int) -> bytes:
        self._spill.seek(self._ends[number])
        return self._spill.read(self._ends[number + 1] - self._ends[number])


def _count(shape: Mapping[str, Any]) -> int:
    if shape["kind"] == "trajectory":
        return 1
    return sum(1 if size is None else 0 if size == GONE else size for size in shape["sizes"])


def _restore(shapes: Sequence[Mapping[str, Any]], one: _Reader, out: IO[bytes]) -> None:
    numbers = iter(range(sum(map(_count, shapes))))
    for shape in shapes:
        if shape["kind"] == "trajectory":
            out.write(one(next(numbers)))
        else:
            groups = _lists(shape["sizes"], numbers)
            if shape["kind"] == "collection":
                rest = shape["rest"]
                _collection(json.loads(rest) if isinstance(rest, str) else rest, groups, one, out)
            else:
                _nested(groups, one, out)
        out.write(b"\n")


def _lists(sizes: Sequence[Any], numbers: Iterator[int]) -> Iterator[list[int] | int]:
    for size in sizes:
        if size is None:
            yield next(numbers)
        elif size != GONE:
            yield list(islice(numbers, size))


def _collection(rest: Mapping[str, Any], groups: Iterable[list[int] | int], one: _Reader, out: IO[bytes]) -> None:
    """An object whose ``trajectories`` are ``groups``; its other fields, in their order, are ``rest``'s."""
    for k, (key, value) in enumerate(rest.items()):
        out.write(b"{" if k == 0 else b", ")
        out.write(json.dumps(key, ensure_ascii=False).encode() + b": ")
        if key == "trajectories":
            _nested(groups, one, out)
        else:
            out.write(json.dumps(value, ensure_ascii=False).encode())
    out.write(b"}")


def _nested(groups: Iterable[list[int] | int], one: _Reader, out: IO[bytes]) -> None:
    out.write(b"[")
    for k, group in enumerate(groups):
        out.write(b", " if k else b"")
        if isinstance(group, int):
            out.write(one(group))
            continue
        out.write(b"[")
        for n, number in enumerate(group):
            out.write((b", " if n else b"") + one(number))
        out.write(b"]")
    out.write(b"]")
