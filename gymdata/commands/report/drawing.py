"""Charts as SVG, written by hand: bars, lines and rates with intervals."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from gymdata.commands.report.charts import Chart
from gymdata.errors import printable

WIDTH, HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34
_ROW = 26
_WIDEST_BAR = 56


def escape(value: object) -> str:
    """A text for HTML: markup is text, and so is what a screen would act on."""
    return html.escape(printable(str(value)))


def number(value: float, digits: int = 3) -> str:
    """A number of an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1e6:.{digits}g} M" if abs(value) >= 1e6 else f"{value / 1e3:.{digits}g} k"
    return f"{value:.{digits}g}" if abs(value) < 1_000 else f"{value:,.0f}"


def numbers(values: Sequence[float]) -> list[tuple[float, str]]:
    """The numbers of an axis with their texts, with as many digits as tell them apart."""
    for digits in range(3, 10):
        texts = [number(value, digits) for value in values]
        if len({*texts}) == len({*values}):
            break
    return list(zip(values, texts, strict=True))


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers within the bounds."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / about))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if span / s <= about + 1)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(chart: Chart) -> str:
    draw = {"bars": _bars, "lines": _lines, "rates": _rates}[chart.kind]
    body, height = draw(chart)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">'
        f"<title>{escape(chart.title)}</title>{body}</svg>"
    )


class _Axes:
    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, (y[0], y[1] if y[1] > y[0] else y[0] + 1.0)

    def point(self, x: float, y: float) -> tuple[float, float]:
        width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0]) if self.x[1] > self.x[0] else 0.5
        return _LEFT + width * across, _TOP + height * (1 - (y - self.y[0]) / (self.y[1] - self.y[0]))

    def frame(self, label: str, x_ticks: Sequence[tuple[float, str]]) -> str:
        parts = []
        for value, text in numbers(ticks(*self.y)):
            _, y = self.point(self.x[0], value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        base = HEIGHT - _BOTTOM
        for value, text in x_ticks:
            x, _ = self.point(value, self.y[0])
            parts.append(f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{escape(text)}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
        parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>')
        return "".join(parts)


def _bars(chart: Chart) -> tuple[str, int]:
    single = all(low == high for low, high, _ in chart.bins)
    apart = chart.bins[1][0] - chart.bins[0][0] if len(chart.bins) > 1 else 1.0
    half = 0.5 * apart if single else 0.0
    axes = _Axes((chart.bins[0][0] - half, chart.bins[-1][1] + half), (0.0, max(n for *_, n in chart.bins)))
    parts = []
    for low, high, count in chart.bins:
        (x0, y0), (x1, y1) = axes.point(low - half, count), axes.point(high + half, 0.0)
        gap = max(0.15 * (x1 - x0), (x1 - x0 - _WIDEST_BAR) / 2) if single else min(1.0, 0.1 * (x1 - x0))
        text = number(low) if low == high else f"{number(low)} to {number(high)}"
        parts.append(
            f'<rect class="a" x="{x0 + gap:.1f}" y="{y0:.1f}" width="{max(x1 - x0 - 2 * gap, 0.5):.1f}" '
            f'height="{y1 - y0:.1f}"><title>{text}: {count:,}</title></rect>'
        )
    values = [low for low, *_ in chart.bins] if single and len(chart.bins) <= 9 else ticks(*axes.x)
    shown = [v for v in values if axes.x[0] <= v <= axes.x[1]]
    return axes.frame(chart.x, numbers(shown)) + "".join(parts), HEIGHT


def _lines(chart: Chart) -> tuple[str, int]:
    points = [p for series in chart.series.values() for p in series]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = chart.bounds or (min(ys), max(ys))
    pad = 0.0 if chart.bounds else 0.06 * (high - low)
    axes = _Axes((min(xs), max(xs)), (low - (pad if low else 0.0), high + pad))
    parts = []
    for index, (name, series) in enumerate(chart.series.items()):
        color = "abcd"[index % 4]
        pixels = [axes.point(x, y) for x, y in series]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
        parts.append(f'<path class="line {color}" d="{path}"><title>{escape(name)}</title></path>')
        if len(pixels) <= 30:
            parts += [
                f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>{escape(name)}, {number(p[0])}: '
                f"{p[1]:.4g}</title></circle>"
                for (x, y), p in zip(pixels, series, strict=True)
            ]
    if len(chart.series) > 1:
        left = _LEFT + 4.0
        for index, name in enumerate(chart.series):
            parts.append(f'<rect class="{"abcd"[index % 4]}" x="{left:.0f}" y="1" width="9" height="9" rx="2"/>')
            parts.append(f'<text x="{left + 13:.0f}" y="10">{escape(name)}</text>')
            left += 26 + 6.2 * len(name)
    # There is no half of a step or an epoch.
    integers = all(float(x).is_integer() for x in xs)
    shown = [v for v in ticks(*axes.x, about=5) if v.is_integer() or not integers]
    return axes.frame(chart.x, numbers(shown)) + "".join(parts), HEIGHT


def _rates(chart: Chart) -> tuple[str, int]:
    """A row per rate, with its interval as a line."""
    low, high = chart.bounds or (0.0, 1.0)
    left = min(170, 24 + 7 * max(len(name) for name, *_ in chart.rates))
    height = _ROW * len(chart.rates) + 26

    def x_of(value: float) -> float:
        return left + (WIDTH - left - 64) * (min(max(value, low), high) - low) / ((high - low) or 1.0)

    parts = []
    for value in ticks(low, high):
        parts.append(f'<line class="grid" x1="{x_of(value):.1f}" x2="{x_of(value):.1f}" y1="4" y2="{height - 20}"/>')
        parts.append(f'<text x="{x_of(value):.1f}" y="{height - 5}" text-anchor="middle">{number(value)}</text>')
    for row, (name, value, least, most) in enumerate(chart.rates):
        y = _ROW * row + 16
        shown = name if len(name) <= 24 else name[:23] + "…"
        parts.append(
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(shown)}<title>{escape(name)}</title></text>'
        )
        if least is not None and most is not None:
            parts.append(f'<line class="span" x1="{x_of(least):.1f}" x2="{x_of(most):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="a" cx="{x_of(value):.1f}" cy="{y}" r="4.5"/>')
        parts.append(f'<text x="{WIDTH - 4}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
    return "".join(parts), height
