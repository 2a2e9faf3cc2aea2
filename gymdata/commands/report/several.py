"""Several runs or trainings at once: each against the first, the settings that differ, and their curves in one chart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from gymdata.commands.report.charts import Chart, lines, rates
from gymdata.commands.report.compare import SAME, Paired, Side
from gymdata.commands.report.rollouts import interval
from gymdata.errors import DataError, counted
from gymdata.public import Figures
from gymdata.settings import Settings
from gymdata.stats import two_way_ci
from gymdata.store import find_run_json, read_run_json
from gymdata.store.lineage import lineage
from gymdata.store.paths import CELL, RUN_JSON, matches
from gymdata.store.run_json import differences, flat

#: Settings that every run has to itself.
_OWN = ("output", "overwrite", "config", "tasks_digest")
#: The part of a name that says the seed.
_SEED = re.compile(r"[_.-]?seed[_.-]?\d+")


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each path: its last part, or as many parts as tell them apart."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(PurePath(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]  # one of them twice


def expanded(paths: Sequence[Path]) -> list[Path]:
    """Of a glob over several runs what it matches, and of the folder of a sweep the results of its cells, the baseline's
    first. Raises DataError for a sweep without a result."""
    runs: list[Path] = []
    for path in (match for named in paths for match in ([named] if find_run_json(named) else matches(named))):
        described = path / RUN_JSON
        facts = read_run_json(described) if described.is_file() else {}
        if facts.get("stage") == "sweep":
            results = [path / result for result in facts.get("results") or []]
            if not results:
                raise DataError.empty(path, "cells with a result; `gymdata sweep` runs them")
            runs += results
        else:
            runs.append(path)
    return runs


def compared(paths: Sequence[Path], score: str | None) -> tuple[list[Figures], list[Figures]]:
    """Each run against the first, on the tasks that both have scored: ``name``, ``path``, ``mean`` over those tasks, and, of
    all but the first, ``difference`` and ``flips``; where those tasks differ, ``on_tasks_of_all`` is the same on the tasks
    that all runs have scored, None without one. Then, where runs differ by their seed alone, each setting against that of
    the first: ``name``, ``seeds``, ``mean`` over seeds and the tasks that all have, and ``difference``. Raises DataError
    where two have no scored task in common."""
    rows: list[Figures] = []
    sides = [Side.read(path, score) for path in paths]
    pairs = [Paired.of(sides[0], side) for side in sides]
    for number, (name, path) in enumerate(zip(names_of(paths), paths, strict=True)):
        paired = pairs[number]
        difference = paired.difference()
        row = {"name": name, "path": str(path), "mean": difference["after"], "tasks": len(paired.ways)}
        rows.append(row if number == 0 else {**row, "difference": difference, "flips": paired.flips})
    names = [str(row["name"]) for row in rows]
    settings = _by_setting(paths, names)
    tasks = sorted(set.intersection(*(set(paired.ways) for paired in pairs)))
    if any(len(paired.ways) > len(tasks) for paired in pairs):
        alone = {name: [number] for number, name in enumerate(names)}
        for row, on_all in zip(rows, _on_tasks(alone, sides, tasks) if tasks else [None] * len(rows), strict=True):
            row["on_tasks_of_all"] = on_all
    return rows, [] if len(settings) == len(paths) or not tasks else _on_tasks(settings, sides, tasks)


def _on_tasks(settings: Mapping[str, list[int]], sides: Sequence[Side], tasks: Sequence[str]) -> list[Figures]:
    """Each setting, of the runs with these numbers, against the first one, on tasks that all runs have."""
    combined, first = list[Figures](), next(iter(settings.values()))
    for name, numbers in settings.items():
        scores, of_first = (
            np.array([[sides[number].by_task[task] for task in tasks] for number in members])
            for members in (numbers, first)
        )
        gap = scores - of_first if len(scores) == len(of_first) else scores.mean(0, keepdims=True) - of_first.mean(0)
        rate, low, high = two_way_ci(gap)
        row = {"name": name, "seeds": len(numbers), "mean": float(scores.mean()), "tasks": len(tasks)}
        against = {"rate": rate, "ci95": interval(low, high), "n": len(tasks)}
        combined.append(row if numbers is first else {**row, "difference": against})
    return combined


def _by_setting(paths: Sequence[Path], names: Sequence[str]) -> dict[str, list[int]]:
    """Name of a setting → the numbers of its runs, which differ by their seeds alone."""
    keys: dict[str, list[tuple[str, int]]] = {}
    for number, path in enumerate(paths):
        setting, seed = _setting(path)
        keys.setdefault(setting, []).append((seed, number))
    settings: dict[str, list[int]] = {}
    for members in keys.values():
        numbers = [number for _, number in sorted(members)]
        if "" in (seeds := {seed for seed, _ in members}) or len(seeds) < len(members):
            settings |= {names[number]: [number] for number in numbers}
        else:
            name = _SEED.sub("", names[numbers[0]]).strip("/") if len(numbers) > 1 else names[numbers[0]]
            known = not name or name in settings or (len(numbers) > 1 and name in names)
            settings[f"{names[numbers[0]]} and {counted(len(numbers) - 1, 'other seed')}" if known else name] = numbers
    return dict(sorted(settings.items(), key=lambda item: min(item[1])))


def _setting(path: Path) -> tuple[str, str]:
    """(all settings without the seed, the seed; "" where none is known) of a cell of a sweep, else of a run and what it was
    made from. Paths of other outputs are left out: these are compared by their own settings."""
    for folder in path.absolute().parents:
        if (folder / CELL).is_file():
            record = json.loads((folder / CELL).read_text(encoding="utf-8"))
            seed = "" if record.get("seed") is None else str(record["seed"])
            return json.dumps([str(folder.parent), str(path.absolute().relative_to(folder)), record["values"]]), seed
    setting, seeds = list[object](), list[str]()
    for facts in lineage(path):
        config = _settings_of(facts)
        own = {key: value for key, value in config.items() if key.split(".")[0] not in _OWN and not _is_output(value)}
        seeds += [f"{key} {own.pop(key)}" for key in sorted(own) if key.rpartition(".")[2] in ("seed", "data_seed")]
        setting.append([facts.get("stage"), own])
    return json.dumps(setting, sort_keys=True, default=str), " ".join(seeds)


def _is_output(value: object) -> bool:
    return isinstance(value, str) and "/" in value and find_run_json(value) is not None


def settings_that_differ(paths: Sequence[Path]) -> dict[str, list[Any]]:
    """Setting → its value in each run, for those that are not the same in all; of what run.json records."""
    described = [find_run_json(path) for path in paths]
    facts = [read_run_json(file) if file is not None else {} for file in described]
    configs = [_settings_of(run) for run in facts]
    changed: dict[str, None] = {}
    for other in configs[1:]:
        changed.update((key, None) for key, _, _ in differences(configs[0], other))
    keys = [key for key in changed if key.split(".")[0] not in _OWN]
    return {key: [config.get(key) for config in configs] for key in sorted(keys)}


def _settings_of(facts: Mapping[str, Any]) -> Settings:
    """Every setting once, by its path: those of a trainer as it took them."""
    own = dict(_mapping(facts.get("config")))
    trainer = _mapping(own.pop("trainer", None))
    return flat({**own, **trainer, **_mapping(facts.get("settings"))})


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


def headline(rows: Sequence[Figures], settings: Sequence[Figures], runs: Sequence[Figures], *, binary: bool) -> str:
    """The best of all runs, or of all settings where seeds are put together, with ties, against the first; of the first
    being the best, the next one against it. Of trainings, how many there are."""
    if not rows:
        return f"{len(runs)} trainings of {', '.join(sorted({run['training'][0]['stage'] for run in runs}))}"
    points = settings or [row.get("on_tasks_of_all", row) for row in rows]
    size = f"{len(rows)} runs" + (f" of {counted(len(points), 'setting')}" if settings else "")
    if None in points:
        return f"{size}; no task is scored in all of them, so none is the best"
    size += f" on the {counted(points[0]['tasks'], 'task')} that all have" if "on_tasks_of_all" in rows[0] else ""
    rates = [0.0 if (gap := row.get("difference")) is None else gap["rate"] for row in points]
    leaders = [row for row, rate in zip(points, rates, strict=True) if rate >= max(rates) - SAME]
    mean = f"{100 * leaders[0]['mean']:.1f} %" if binary else f"{leaders[0]['mean']:.3f}"
    names = " and ".join(str(row["name"]) for row in leaders) + (" (tied)" if len(leaders) > 1 else "")
    left_out = "".join(
        f"; left out in {row['name']}: {row['difference']['other_content']}"
        for row in rows
        if "other_content" in row.get("difference", ())
    )
    if len(leaders) == len(points):
        equal = "1 setting" if len(points) == 1 else "all equal"
        return f"{size}; {equal}, {mean}, {counted(points[-1]['tasks'], 'task')}{left_out}"
    if leaders[0] is points[0]:
        rest = [(rate, row) for rate, row in zip(rates, points, strict=True) if row not in leaders]
        row = max(rest, key=lambda pair: pair[0])[1]
        return f"{size}; best {names}, {mean}; next {row['name']}: {_gap(row, binary=binary)}{left_out}"
    against = f" against {points[0]['name']},"
    return f"{size}; best {names}, {mean}: {_gap(leaders[0], binary=binary).replace(',', against, 1)}{left_out}"


def _gap(row: Figures, *, binary: bool) -> str:
    gap, scale = row["difference"], 100.0 if binary else 1.0
    ends = f" ({scale * gap['ci95'][0]:+.3g} to {scale * gap['ci95'][1]:+.3g})" if gap["ci95"] else ""
    return f"{scale * gap['rate']:+.3g}{' points' if binary else ''}{ends}, {counted(gap['n'], 'task')}"
