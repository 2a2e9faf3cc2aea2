"""The charts of a report, one file per chart or family: ``@chart("name", section="rewards")`` draws one on each page.

A chart gets the figures of one run, as ``gymdata report --json`` prints them, and yields ``bars``, ``lines`` and ``rates``;
those without data are left out. The page shows a section's charts by ``order``. Another package adds charts through entry
points of the group ``gymdata.charts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gymdata.public import Figures as Figures
from gymdata.registry import Registry

Points = Sequence[Sequence[float]]
Draw = Callable[[Figures], Iterable["Chart"]]

#: Of the page, in its order; those of ``OF_ROLLOUTS`` are left out where there are no rollouts.
OF_ROLLOUTS = ("rewards", "sizes", "time")
SECTIONS = (*OF_ROLLOUTS, "stages")


@dataclass(frozen=True, slots=True)
class Chart:
    """``kind``: ``bars`` (of ``bins``), ``lines`` (of ``series``) or ``rates`` (of ``rates``: name, value, low, high).

    ``bins``: (low, high, count), where a bin of one value has low = high. ``series``: name to (x, y) points.
    ``bounds``: of the vertical axis, where they are known.
    """

    name: str
    title: str
    kind: str
    x: str = ""
    bins: Sequence[tuple[float, float, float]] = ()
    series: Mapping[str, Points] = field(default_factory=dict)
    rates: Sequence[tuple[str, float, float | None, float | None]] = ()
    bounds: tuple[float, float] | None = None


CHARTS: Registry[Draw] = Registry("chart", __name__, "gymdata.charts")


def chart(name: str, section: str, order: int = 0) -> Callable[[Draw], Draw]:
    """A decorator that adds a chart to a section of the page."""
    return CHARTS.register(name, section=section, order=order)


def charts_of(run: Figures, *sections: str) -> list[Chart]:
    """The charts of a run that have data: of some sections, or of all, in the page's order."""
    shown = [name for name in sections or SECTIONS if run["rewards"] is not None or name not in OF_ROLLOUTS]
    entries = [entry for entry in CHARTS if entry.facts["section"] in shown]
    entries.sort(key=lambda entry: (SECTIONS.index(entry.facts["section"]), entry.facts["order"], entry.name))
    return [c for entry in entries for c in entry.object(run) if c.bins or c.series or c.rates]


def bars(name: str, title: str, bins: Sequence[Mapping[str, float]], x: str) -> Chart:
    """Bars of what ``report.rollouts.histogram`` returns."""
    return Chart(name, title, "bars", x, bins=[(row["low"], row["high"], row["count"]) for row in bins])


def lines(name: str, title: str, series: Mapping[str, Points], x: str) -> Chart:
    """A line for each series that has points."""
    return Chart(name, title, "lines", x, series={key: points for key, points in series.items() if points})


def rates(name: str, title: str, values: Mapping[str, Figures], bounds: tuple[float, float] | None = None) -> Chart:
    """Rates or means with their intervals (``rate``, ``mean`` or ``value``, and ``ci95``)."""
    rows = []
    for key, row in values.items():
        value, ends = row.get("rate", row.get("mean", row.get("value"))), row.get("ci95") or [None, None]
        if value is not None:
            rows.append((key, float(value), *ends))
    if rows and bounds is None:
        numbers = [number for _, *values_of_row in rows for number in values_of_row if number is not None]
        bounds = (0.0, 1.0) if min(numbers) >= 0 and max(numbers) <= 1 else (min(numbers), max(numbers))
    return Chart(name, title, "rates", rates=rows, bounds=bounds)
