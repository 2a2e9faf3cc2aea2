"""A benchmark's result and how two commands are compared: in turn, warmed up, by medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table. ``ratio`` is what ``bound`` speaks of; exactly one of the bounds may be given."""

    what: str
    ours: str
    rival: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:.3g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else "–"

    @property
    def missed(self) -> bool:
        low = self.at_least is not None and self.ratio < self.at_least
        return low or (self.at_most is not None and self.ratio > self.at_most)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | ours | rival | ratio | bound |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {r.what} | {r.ours} | {r.rival} | {r.ratio:.2f} | {r.bound}{' **missed**' if r.missed else ''} |"
        for r in rows
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Timing:
    """Wall and CPU seconds of interleaved runs."""

    ours: list[float]
    rival: list[float]
    ours_cpu: list[float]
    rival_cpu: list[float]

    @property
    def speedup(self) -> float:
        """How many times faster ours is, by medians."""
        return statistics.median(self.rival) / statistics.median(self.ours)

    @property
    def cost(self) -> float:
        """How many times as long ours takes, by medians."""
        return 1 / self.speedup


def interleave(ours: Callable[[], object], rival: Callable[[], object], runs: int = 5) -> Timing:
    """Time both ``runs`` times in turn after one warm-up each."""
    ours(), rival()
    result = Timing([], [], [], [])
    for _ in range(runs):
        for run, wall, cpu in ((ours, result.ours, result.ours_cpu), (rival, result.rival, result.rival_cpu)):
            began, began_cpu = time.perf_counter(), time.process_time()
            run()
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - began_cpu)
    return result


def seconds(values: Sequence[float]) -> str:
    """A median with its range, as shown in the table."""
    return f"{statistics.median(values):.3g} s [{min(values):.3g}–{max(values):.3g}]"
