"""What came of the cells of a sweep: rates over tasks and seeds, and paired differences from a baseline."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gymdata.commands.report.rollouts import Rewards, interval
from gymdata.commands.sweep.settings import Cell, Value
from gymdata.errors import DataError, counted
from gymdata.models.model_identity import policy_hash
from gymdata.public import Figures
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import default_score, with_score
from gymdata.stats import two_way_ci
from gymdata.store import read_run_json, read_table
from gymdata.store.paths import RUN_JSON
from gymdata.store.task_contents import TaskContent, other_contents, refuse_others, task_contents


@dataclass(frozen=True, slots=True)
class Combination:
    """A point of the grid over its seeds. ``rate``: mean reward over tasks and seeds, ``ci95`` its bootstrap interval over
    both; ``by_seed``: seed → its mean; ``steps``: those of its cells' trainings, as
    ``3 + 1``, each once; ``difference``: that from the baseline, paired by task and seed, None of the baseline
    itself and without a result in common; ``missing``: cells without a result; ``seconds``: of all its cells."""

    values: dict[str, Value]
    cells: int
    missing: int
    n_tasks: int
    rate: float | None
    ci95: list[float] | None
    by_seed: dict[str, float]
    steps: list[str]
    difference: Figures | None
    seconds: float
    is_baseline: bool


@dataclass(frozen=True, slots=True)
class CellResult:
    """``by_task``: task → mean reward; ``steps``: of its trainings, as ``3 + 1``; ``weights``: hash of what the last one
    trained; empty without a training."""

    by_task: dict[str, float]
    steps: str
    weights: str


def results_of(done: Sequence[Cell]) -> dict[str, CellResult]:
    """Cell → its result. Raises DataError where the results are not of the same tasks: a mean over them would be of
    different questions."""
    results, digests = dict[str, CellResult](), dict[str, str]()
    contents = dict[str, dict[str, TaskContent]]()
    score, _ = default_score([cell.result for cell in done], None) if done else (None, None)
    for cell in done:
        table = read_table(cell.result, ROLLOUTS, ["rollout_id", "task_id", "reward", "rewards"])
        by_task = Rewards.of(with_score([cell.result], table, score)[0]).by_task()
        trained = [(run_json.parent, read_run_json(run_json)) for run_json in cell.folder.glob(f"*/{RUN_JSON}")]
        trained = [(folder, facts) for folder, facts in trained if str(facts.get("stage")).startswith("train-")]
        trained.sort(key=lambda output: _step_of(cell, output[0]))
        steps, weights = " + ".join(str(facts.get("steps") or 0) for _, facts in trained), ""
        with contextlib.suppress(DataError):  # another kind of model
            weights = policy_hash(trained[-1][0]) if trained else ""
        results[cell.name] = CellResult(by_task, steps, weights)
        digests[cell.name] = str((read_run_json(cell.result).get("tasks") or {}).get("digest"))
        first = next(iter(digests))
        if digests[cell.name] != digests[first]:
            raise DataError(
                f"{cell.result}: has other tasks than the result of {first}, so they cannot be compared",
                hint="let every cell evaluate on the same task file",
            )
        contents[cell.name] = task_contents(cell.result)
        refuse_others(first, cell.result, other_contents(contents[first], contents[cell.name]))
    return results


def _step_of(cell: Cell, folder: Path) -> int:
    """The number of the command that writes a folder of the cell."""
    return next((n for n, words in enumerate(cell.commands) if str(folder) in words), len(cell.commands))


def alike(results: Mapping[str, CellResult]) -> list[str]:
    """Sentences about cells that trained equal weights, or earned equal rewards on every task: nothing was compared."""
    sentences = []
    for what in ("weights", "rewards"):
        groups: dict[object, list[str]] = {}
        for name, result in results.items():
            key = result.weights if what == "weights" else tuple(sorted(result.by_task.items()))
            groups.setdefault(key or name, []).append(name)
        for names in (names for names in groups.values() if len(names) > 1):
            which = "all cells" if len(names) == len(results) else ", ".join(names)
            steps = {results[name].steps for name in names} - {""}
            each = f"{counted(int(s), 'step')} each, " if len(steps) == 1 and (s := next(iter(steps))).isdigit() else ""
            equal = (
                "trained weights" if what == "weights" else f"rewards of all {len(results[names[0]].by_task):,} tasks"
            )
            sentences.append(f"{each}{equal} equal in {which}")
    return sentences


def combinations(
    cells: Sequence[Cell],
    results_by_cell: Mapping[str, CellResult],
    seconds: Mapping[str, float],
    baseline: Mapping[str, Value],
) -> list[Combination]:
    """One for each point of the grid, in its order. ``results_by_cell``: of the cells that have a result."""
    by_cell = {name: result.by_task for name, result in results_by_cell.items()}
    points = [dict(items) for items in dict.fromkeys(tuple(cell.values.items()) for cell in cells)]
    results = [
        {cell.seed: by_cell[cell.name] for cell in cells if cell.name in by_cell and cell.values == point}
        for point in points
    ]
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
                steps=sorted({r.steps for cell in seed_cells if (r := results_by_cell.get(cell.name)) and r.steps}),
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
