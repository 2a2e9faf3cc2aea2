"""The charts of a report, by the section of the page on which they are.

Each function gets the figures of one run, as ``gymdata report --json`` prints them, and yields ``bars``, ``lines`` and
``rates``; those without data are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gymdata.commands.report.stages import curve
from gymdata.public import Figures as Figures

Points = Sequence[Sequence[float]]
#: Numbers of an epoch of ``finetune`` that are drawn, with their titles.
_EPOCH_CURVES = {"training_loss": "training loss", "kl_to_start": "KL to the first policy"}


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


def charts_of(run: Figures, section: str) -> list[Chart]:
    """The charts of a run in a section (rewards, sizes, time, stages) that have data, in the page's order."""
    if section != "stages" and run["rewards"] is None:
        return []
    return [c for draw in _SECTIONS[section] for c in draw(run) if c.bins or c.series or c.rates]


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


def rewards(run: Figures) -> Iterator[Chart]:
    """Rewards of rollouts, means of groups of several, pass@k and parts where there are several."""
    if not run["rewards"]["n"]:
        return
    yield bars("rewards", "Rewards of rollouts", run["rewards"]["histogram"], "reward")
    groups = run["rewards"]["groups"]
    if groups["of_several"]:
        yield bars("groups", "Mean reward of groups", groups["means"], "mean reward")
    if len(run["pass_at_k"]) > 1:
        yield rates("pass-at-k", "pass@k", {f"pass@{row['k']}": row for row in run["pass_at_k"]})
    if len(run["rewards"]["parts"]) > 1:
        yield rates("parts", "Reward parts", run["rewards"]["parts"])


def sizes(run: Figures) -> Iterator[Chart]:
    """Sampled tokens and turns per rollout, and log-probabilities."""
    lengths = run["lengths"]
    if lengths:
        yield bars("tokens", "Generated tokens per rollout", lengths["generated"]["histogram"], "tokens")
        yield bars("turns", "Turns per rollout", lengths["turns"]["histogram"], "turns")
    yield bars("logprobs", "Log-probabilities of sampled tokens", run["logprobs"]["histogram"], "log-probability")


def time(run: Figures) -> Iterator[Chart]:
    """Tokens per second, and rollouts and failures, by the second in which they ended."""
    points = run["over_time"]
    yield lines("speed", "Tokens per second", {"tokens/s": [(p["s"], p["tokens_per_s"]) for p in points]}, "seconds")
    counts = {
        name: [(p["s"], p[name]) for p in points]
        for name in ("rollouts", "failures")
        if name == "rollouts" or any(p[name] for p in points)
    }
    yield lines("progress", "Rollouts finished", counts, "seconds")


def data(run: Figures) -> Iterator[Chart]:
    """Margins of pairs, values of scores, advantages of experiences, and rates of judges."""
    for n, row in enumerate(run["pairs"], 1):
        yield bars(f"margins-{n}", f"Margins of {row['path']}", row["margin"]["histogram"], "margin")
    for n, row in enumerate(run["scores"], 1):
        yield bars(f"scores-{n}", f"Scores of {row['name']}", row["histogram"], "score")
    for n, row in enumerate(run["experiences"], 1):
        yield bars(f"advantages-{n}", "Advantages of sequences", row["advantage"]["histogram"], "mean advantage")
    for n, row in enumerate(run["judge"], 1):
        of_judge = {name.replace("_", " "): rate for name, rate in row["bias"].items()}
        yield rates(f"judge-{n}", f"Bias of {row['judge']}", of_judge, (0.0, 1.0))


def training(run: Figures) -> Iterator[Chart]:
    """Each curve of each training."""
    for n, row in enumerate(run["training"], 1):
        for name, points in row["curves"].items():
            title = f"{PurePath(row['path']).name}: {name}"
            yield lines(f"training-{n}-{name.replace('/', '-')}", title, {name: points}, "step")


def epochs(run: Figures) -> Iterator[Chart]:
    """Reward, held-out rate, loss and KL over the epochs of finetuning."""
    rows = run["epochs"]
    held_out = curve(rows, "epoch", "validation.rate")
    first = ((run["end"] or {}).get("validation") or {}).get("first") or {}
    if rows and first.get("epoch") == 0 and first.get("rate") is not None:
        held_out = [[0.0, first["rate"]], *held_out]
    rewards = {"training reward": curve(rows, "epoch", "reward_mean"), "held-out rate": held_out}
    yield lines("epochs-reward", "Reward and held-out rate", rewards, "epoch")
    for name, title in _EPOCH_CURVES.items():
        yield lines(f"epochs-{name}", title, {name: curve(rows, "epoch", name)}, "epoch")


_SECTIONS: dict[str, Sequence[Callable[[Figures], Iterable[Chart]]]] = {
    "rewards": (rewards,), "sizes": (sizes,), "time": (time,), "stages": (data, training, epochs),
}  # fmt: skip
