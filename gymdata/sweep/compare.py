"""What came of the cells of a sweep: rates over tasks and seeds, and paired differences from a baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gymdata.errors import DataError
from gymdata.public import Figures
from gymdata.report.rollouts import Rewards, interval
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.stats import two_way_ci
from gymdata.store import read_run_json, read_table
from gymdata.sweep.settings import Cell, Value


@dataclass(frozen=True, slots=True)
class Combination:
    """A point of the grid over its seeds. ``rate``: mean reward over tasks and seeds, ``ci95`` its bootstrap interval over
    both; ``by_seed``: seed → its mean; ``difference``: that from the baseline, paired by task and seed, None of the baseline
    itself and without a result in common; ``missing``: cells without a result; ``seconds``: of all its cells."""

    values: dict[str, Value]
    cells: int
    missing: int
    n_tasks: int
    rate: float | None
    ci95: list[float] | None
    by_seed: dict[str, float]
    difference: Figures | None
    seconds: float
    is_baseline: bool


def combinations(
    cells: Sequence[Cell], done: Sequence[Cell], seconds: Mapping[str, float], baseline: Mapping[str, Value]
) -> list[Combination]:
    """One for each point of the grid, in its order. ``done``: the cells that have a result.

    Raises DataError where the results are not of the same tasks: a mean over them would be of different questions.
    """
    by_cell, digests = dict[str, dict[str, float]](), dict[str, str]()
    for cell in done:
        rewards = Rewards.of(read_table(cell.result, ROLLOUTS, ["task_id", "reward"]))
        by_cell[cell.name] = rewards.by_task()
        digests[cell.name] = str((read_run_json(cell.result).get("tasks") or {}).get("digest"))
        first = next(iter(digests))
        if digests[cell.name] != digests[first]:
            raise DataError(
                f"{cell.result}: has other tasks than the result of {first}, so they cannot be compared",
                hint="let every cell evaluate on the same task file",
            )
    points = [dict(items) for items in dict.fromkeys(tuple(cell.values.items()) for cell in cells)]
    results = [{cell.seed: by_cell[cell.name] for cell in done if cell.values == point} for point in points]
    of_baseline = results[points.index(dict(baseline))]
    combined = []
    for point, by_point in zip(points, results, strict=True):
        seed_cells, is_baseline = [cell for cell in cells if cell.values == point], point == dict(baseline)
        scores = _scores([*by_point.values()])
        mean, low, high = two_way_ci(scores)
        difference = None
        seeds = [seed for seed in by_point if seed in of_baseline]
        if seeds and not is_baseline:
            paired = _scores([result[seed] for result in (by_point, of_baseline) for seed in seeds])
            if paired.size:
                point_scores, baseline_scores = np.split(paired, 2)
                rate, lower, upper = two_way_ci(point_scores - baseline_scores)
                difference = {"rate": rate, "ci95": interval(lower, upper), "n": paired.shape[1], "seeds": len(seeds)}
        by_seed = {
            str(cell.seed): math.fsum(by_cell[cell.name].values()) / len(by_cell[cell.name])
            for cell in seed_cells
            if by_cell.get(cell.name)
        }
        combined.append(
            Combination(
                values=point,
                cells=len(seed_cells),
                missing=sum(cell.name not in by_cell for cell in seed_cells),
                n_tasks=scores.shape[1],
                rate=None if math.isnan(mean) else mean,
                ci95=interval(low, high),
                by_seed=by_seed,
                difference=difference,
                seconds=round(sum(seconds.get(cell.name, 0.0) for cell in seed_cells), 1),
                is_baseline=is_baseline,
            )
        )
    return combined


def _scores(results: Sequence[Mapping[str, float]]) -> npt.NDArray[np.float64]:
    """The scores, of shape (results, tasks), of the tasks that all of them have."""
    tasks = sorted(set.intersection(*map(set, results))) if results else []
    scores = [[result[task] for task in tasks] for result in results]
    return np.array(scores, np.float64).reshape(len(results), len(tasks))
