"""``gymdata sweep``: run every cell of a grid, one command after the other, and compare what they evaluate to.

Invariants: a step is done when CELL/cell.json says so, which it says only after the command has ended with 0, and for the
content that its inputs had then: after a change it and the steps after it are run again, and resume or refuse; a cell is run
by one process at a time, so that the same command started several times, here or on machines that share the folder, divides
the cells; a cell that was begun with other commands is refused. Steps are commands that resume, so a kill repeats no work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gymdata.commands.finetune.jobs import failed as failure
from gymdata.commands.finetune.jobs import gymdata_words, start, wait
from gymdata.commands.sweep.compare import Combination, alike, combinations, results_of
from gymdata.commands.sweep.inputs import inputs
from gymdata.commands.sweep.settings import Cell, SweepConfig
from gymdata.errors import (
    EXIT_FAULTS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    DataError,
    GymdataError,
    StoreError,
    UsageError,
)
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, markdown_table, rate_text
from gymdata.store import find_run_json, write_run_json
from gymdata.store.lock import Lock, is_held
from gymdata.store.paths import CELL, local_output
from gymdata.store.run_json import write_json, write_text
from gymdata.store.stage_output import refuse_other_kind

__all__ = ["SweepPlan", "SweepReport", "sweep"]

RESULTS_JSON, RESULTS_MD = "results.json", "results.md"
_INTERVALS = "bootstrap over tasks and seeds; differences are paired by both"


@dataclass(frozen=True, slots=True, repr=False)
class SweepPlan(Report):
    """What ``sweep`` would do: cell → its commands that are not done yet."""

    path: Path
    cells: int
    steps: dict[str, list[str]]

    def rows(self) -> list[Row]:
        pending = [(name, f"gymdata {step}") for name, steps in self.steps.items() for step in steps]
        return [("cells", self.cells), ("commands to run", len(pending)), *pending]


@dataclass(frozen=True, slots=True, repr=False)
class SweepReport(Report):
    """``combinations``: one for each point of the grid; ``failed``: cell → why its command ended; ``elsewhere``: cells that
    other processes are running; ``alike``: sentences about cells that trained or earned the same."""

    path: Path
    cells: int
    done: int
    combinations: list[Combination]
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    interrupted: bool = False
    alike: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """130 interrupted; 1 where cells failed; else 0, also while others are running the rest."""
        return EXIT_INTERRUPTED if self.interrupted else EXIT_FAULTS if self.failed else EXIT_OK

    def rows(self) -> list[Row]:
        first = next(iter(self.failed.items()), None)
        return [
            ("cells", f"{self.done:,} of {self.cells:,}"),
            *([("run by others", len(self.elsewhere))] if self.elsewhere else []),
            *([("failed", len(self.failed)), ("  first", f"{first[0]}: {first[1]}")] if first else []),
            *([("interrupted", "rerun the same command to resume")] if self.interrupted else []),
            *(("nothing was compared", sentence) for sentence in self.alike),
            ("intervals", _INTERVALS),
            *(("results", file) for file in self.files),
            ("written to", self.path),
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: the values that differ, the mean reward, the difference from the baseline, seeds, the steps of
        the cells' trainings, and minutes. A seed without a result is a dash."""
        names, trained = list(self.combinations[0].values), any(point.steps for point in self.combinations)
        rows = []
        for point in self.combinations:
            gap = "baseline" if point.is_baseline else "–"
            if point.difference is not None:
                gap = rate_text(point.difference).replace(" %", " points", 1)
            seeds = ", ".join([*(f"{100 * rate:.1f}" for rate in point.by_seed.values()), *["–"] * point.missing])
            rate = rate_text({"rate": point.rate, "ci95": point.ci95})
            values = [str(point.values[name]) for name in names]
            steps = [", ".join(point.steps)] if trained else []
            rows.append([*values, rate, gap, seeds, *steps, f"{point.seconds / 60:.1f}"])
        steps = ["steps"] if trained else []
        return [*names, "mean reward", "against the baseline", "by seed, %", *steps, "minutes"], rows


def sweep(
    file: str | Path | None = None,
    *,
    config: SweepConfig | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> SweepReport | SweepPlan:
    """Run the commands of a sweep ``file`` (YAML) for every combination of its grid and every seed, and compare the results.

    Settings are those of ``SweepConfig``, which beat the file's. A step that is done is not run again; cells that another
    process is running are left to it. A cell whose command fails is reported, and the others are run. Writes
    ``results.json`` and ``results.md`` into the output folder. Raises UsageError for a file that makes no sense and for a
    command that is refused as wrong usage, StoreError for a cell that was begun with other commands.
    """
    if file is not None:
        config = SweepConfig.load(Path(file), settings)
    else:
        config = SweepConfig.called_with(sweep, config, settings)
    stem = "sweep" if file is None else Path(file).stem
    folder = local_output(config.output or Path("runs") / stem)
    cells = config.cells(folder)
    refuse_other_kind(folder, "sweep")
    if dry_run:
        first = {cell.name: 0 if overwrite else _steps_done(cell) for cell in cells}
        commands = {cell.name: [shlex.join(words) for words in cell.commands[first[cell.name] :]] for cell in cells}
        return SweepPlan(folder, len(cells), {name: steps for name, steps in commands.items() if steps})
    say = progress or NullProgress()
    failed, elsewhere, interrupted = dict[str, str](), list[str](), False
    numbered = [*enumerate(cells)]
    pending = numbered if overwrite else [(n, cell) for n, cell in numbered if _steps_done(cell) < len(cell.commands)]
    if pending:
        # Another process that is started at the same time writes the same.
        with contextlib.suppress(StoreError):
            left = [cell.name for _, cell in pending]
            _describe(folder, config, cells, [cell for cell in cells if cell.name not in left], failed, command)
    for number, cell in pending:
        say.update(done=number, total=len(cells))
        try:
            lock = _lock(cell, overwrite)
        except StoreError as error:
            if not is_held(cell.folder):
                raise
            elsewhere.append(cell.name)
            say.message(f"{cell.name}: left to another process ({error})")
            continue
        try:
            _run(cell, say)
        except KeyboardInterrupt:
            interrupted = True
            break
        except GymdataError as error:
            if error.exit_code == EXIT_USAGE:
                raise
            failed[cell.name] = str(error).splitlines()[0]
            say.message(f"{cell.name}: {error}")
        finally:
            lock.release()
    return _finished(folder, config, cells, failed, elsewhere, command, interrupted=interrupted)


def _lock(cell: Cell, overwrite: bool) -> Lock:
    cell.folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(cell.folder)
    if overwrite:
        for path in cell.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
    return lock


def _record(cell: Cell) -> Figures:
    """cell.json: ``commands`` that are done, each with its ``seconds``."""
    file = cell.folder / CELL
    if not file.is_file():
        return {"values": cell.values, "seed": cell.seed, "done": []}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise DataError.unreadable(file, f"not JSON ({error})", "remove it, and the cell is run again") from error


def _steps_done(cell: Cell) -> int:
    done = [step["command"] for step in _record(cell)["done"]]
    now = [shlex.join(words) for words in cell.commands]
    if done != now[: len(done)]:
        steps = enumerate(zip(done, [*now, *[None] * len(done)], strict=False), 1)
        raise StoreError.other_identity(cell.folder, [(f"step {n}", was, new) for n, (was, new) in steps if was != new])
    steps_done = zip(_record(cell)["done"], cell.commands, strict=False)
    return next(
        (n for n, (step, words) in enumerate(steps_done) if step.get("inputs") != inputs(words, cell.folder)), len(done)
    )


def _run(cell: Cell, progress: Progress) -> None:
    """The steps that are not done yet."""
    first = _steps_done(cell)
    record = _record(cell)
    del record["done"][first:]
    for number, words in enumerate(cell.commands[first:], first + 1):
        progress.message(f"{cell.name}: gymdata {shlex.join(words)}")
        began, read = time.monotonic(), inputs(words, cell.folder)
        log = cell.folder / "logs" / f"{number}-{words[0]}.log"
        code = wait(start(gymdata_words(words), log), log, NullProgress())
        if code in (EXIT_INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        if code != EXIT_OK:
            raise failure(f"`gymdata {words[0]}`", code, log)
        seconds = round(time.monotonic() - began, 3)
        record["done"].append({"command": shlex.join(words), "seconds": seconds, "inputs": read})
        write_json(cell.folder / CELL, record)


def _describe(
    folder: Path,
    config: SweepConfig,
    cells: Sequence[Cell],
    done: Sequence[Cell],
    failed: Mapping[str, str],
    command: Sequence[str],
) -> dict[str, int]:
    """Write the run.json of the sweep; returns its counts."""
    status = "completed" if len(done) == len(cells) else "running"
    facts = {"stage": "sweep", "command": list(command), "config": config.model_dump(mode="json"), "status": status}
    counts = {"cells": len(cells), "done": len(done), "failed": len(failed)}
    # The baseline is what the others are compared with, so it comes first.
    results = sorted(done, key=lambda cell: not config.baseline.items() <= cell.values.items())
    facts["results"] = [os.path.relpath(cell.result, folder) for cell in results]
    write_run_json(folder, {**facts, "counts": counts})
    return counts


def _finished(
    folder: Path,
    config: SweepConfig,
    cells: Sequence[Cell],
    failed: Mapping[str, str],
    elsewhere: Sequence[str],
    command: Sequence[str],
    *,
    interrupted: bool,
) -> SweepReport:
    """The comparison of what is done, by this process and others, and its files."""
    records = {cell.name: _record(cell)["done"] for cell in cells}
    done = [cell for cell in cells if _steps_done(cell) == len(cell.commands)]
    for cell in done:
        if find_run_json(cell.result) is None:
            raise UsageError.bad_value(
                "result", str(cell.result), "the run that a step writes, such as that of an eval"
            )
    seconds = {name: sum(step["seconds"] for step in steps) for name, steps in records.items()}
    baseline = next(cell.values for cell in cells if config.baseline.items() <= cell.values.items())
    results = results_of(done)
    compared, equal = combinations(cells, results, seconds, baseline), alike(results)
    report = SweepReport(folder, len(cells), len(done), compared, dict(failed), list(elsewhere), interrupted, equal)
    counts = _describe(folder, config, cells, done, failed, command)
    texts = {
        RESULTS_JSON: json.dumps(
            {"combinations": [asdict(point) for point in compared], "alike": equal, **counts}, indent=2
        )
        + "\n",
        RESULTS_MD: f"{markdown_table(*report.table())}\nIntervals: {_INTERVALS}.\n"
        + "".join(f"\n{line}.\n" for line in equal),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
        report.files.append(folder / name)
    return report
