"""``gymdata sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Watch, command_words, finish
from .flags import DryRun, Json, Overwrite

_File = Annotated[Path, typer.Argument(metavar="FILE.yaml", help="File with steps, grid, seeds, result and baseline.")]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder of the sweep (default: runs/NAME-OF-THE-FILE).")
]


def sweep(
    file: _File, output: _Output = None, dry_run: DryRun = False, overwrite: Overwrite = False, json: Json = False
) -> int:
    """Every combination of the grid runs the file's commands with every seed, one after the other; then the rewards of their
    evaluations are compared. Cells that are done are not run again, and a sweep that is started several times divides them.
    """
    from gymdata.commands.sweep import run as sweeping
    from gymdata.commands.sweep.settings import SweepConfig
    from gymdata.errors import GymdataError, MissingExtraError, UsageError

    from .main import check_words

    faults = dict[str, UsageError]()
    cells = SweepConfig.load(file).cells(Path("{output}"))
    # Those of other seeds differ in a number only.
    for cell in [cell for cell in cells if cell.seed == cells[0].seed]:
        for words in cell.commands:
            try:
                check_words(words)
            except GymdataError as error:
                # What this machine lacks, or a file that an earlier step writes, may be there when the command runs.
                if isinstance(error, MissingExtraError) or "{output}" in str(error):
                    continue
                if not isinstance(error, UsageError):
                    raise
                faults.setdefault(str(error), error.within(f"{cell.name}: gymdata {words[0]}"))
    if faults:
        raise UsageError.several(faults.values())
    with Watch("sweep") as watch:
        report = sweeping.sweep(
            file, output=output, dry_run=dry_run, overwrite=overwrite, progress=watch, command=command_words()
        )
    if isinstance(report, sweeping.SweepPlan):
        return finish(report, "sweep (dry run: nothing was run)", json=json)

    return finish(report, "sweep", json=json, above=[(*report.table(), "")])
