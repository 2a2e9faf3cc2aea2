"""Several runs or trainings at once: each against the first, the settings that differ, and their curves in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from gymdata.public import Figures
from gymdata.report.charts import Chart, lines, rates
from gymdata.report.compare import Paired
from gymdata.settings import Settings
from gymdata.store import find_run_json, read_run_json
from gymdata.store.run_json import differences, flat

#: Settings that every run has to itself.
_OWN = ("output", "overwrite", "config", "tasks_digest")


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each path: its last part, or as many parts as tell them apart."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(PurePath(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]  # one of them twice


def compared(paths: Sequence[Path], score: str | None) -> list[Figures]:
    """Each run against the first, on the tasks that both have scored: ``name``, ``path``, ``mean`` over those tasks, and, of
    all but the first, ``difference`` and ``flips``. Raises DataError where two have no scored task in common."""
    rows: list[Figures] = []
    for number, (name, path) in enumerate(zip(names_of(paths), paths, strict=True)):
        paired = Paired.of(paths[0], path, score)
        difference = paired.difference()
        row = {"name": name, "path": str(path), "mean": difference["after"], "tasks": len(paired.ways)}
        rows.append(row if number == 0 else {**row, "difference": difference, "flips": paired.flips})
    return rows


def settings_that_differ(paths: Sequence[Path]) -> dict[str, list[Any]]:
    """Setting → its value in each run, for those that are not the same in all; of what run.json records."""
    described = [find_run_json(path) for path in paths]
    facts = [read_run_json(file) if file is not None else {} for file in described]
    configs = [flat({**_mapping(run.get("config")), **_mapping(run.get("settings"))}) for run in facts]
    changed: dict[str, None] = {}
    for other in configs[1:]:
        changed.update((key, None) for key, _, _ in differences(configs[0], other))
    keys = [key for key in changed if key.split(".")[0] not in _OWN]
    return {key: [config.get(key) for config in configs] for key in sorted(keys)}


def _mapping(value: Any) -> Settings:
    return value if isinstance(value, dict) else {}


def charts_of_several(names: Sequence[str], runs: Sequence[Figures]) -> list[Chart]:
    """Mean rewards with their intervals, and each curve of the trainings with a line for every run."""
    scored = {name: run["rewards"] for name, run in zip(names, runs, strict=True) if run["rewards"]}
    charts = [rates("compared", "Mean reward", scored)] if len(scored) > 1 else []
    of_runs = [(name, row["curves"]) for name, run in zip(names, runs, strict=True) for row in run["training"][:1]]
    for curve in dict.fromkeys(curve for _, curves in of_runs for curve in curves):
        series = {name: curves[curve] for name, curves in of_runs if curve in curves}
        if len(series) > 1:
            charts.append(lines(f"compared-{curve.replace('/', '-')}", curve, series, "step"))
    return charts


def headline(rows: Sequence[Figures], runs: Sequence[Figures], *, binary: bool) -> str:
    """The best run against the first; of trainings, how many there are."""
    if not rows:
        return f"{len(runs)} trainings of {', '.join(sorted({run['training'][0]['stage'] for run in runs}))}"
    best = max(rows[1:], key=lambda row: row["difference"]["rate"])
    gap, scale = best["difference"], 100.0 if binary else 1.0
    ends = f" ({scale * gap['ci95'][0]:+.3g} to {scale * gap['ci95'][1]:+.3g})" if gap["ci95"] else ""
    unit = " points" if binary else ""
    mean = f"{100 * best['mean']:.1f} %" if binary else f"{best['mean']:.3f}"
    return (
        f"{len(rows)} runs; best {best['name']}, {mean}: {scale * gap['rate']:+.3g}{unit}{ends} against {rows[0]['name']}, "
        f"{gap['n']:,} tasks"
    )
