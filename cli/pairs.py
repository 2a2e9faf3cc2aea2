"""``gymdata pairs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymdata.pairs.settings import PairsConfig

from .console import command_words, emit_json, facts, warn_once
from .flags import Json, Output, Overwrite, RunFiles, with_flags

if TYPE_CHECKING:
    from gymdata.pairs.run import PairsReport

#: Sides of a split as they are called.
_SIDES = {"heldout": "held-out"}


@with_flags(PairsConfig, {"source": ["--from"]})
def pairs(
    path: RunFiles,
    output: Output = None,
    *,
    settings: PairsConfig,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Pairs hold the saved token IDs and masks."""
    from gymdata.pairs.run import pairs as run

    report = run(path, output=output, config=settings, overwrite=overwrite, command=command_words())
    warn_once(report.notes)
    if json:
        emit_json(report.to_dict())
    else:
        _show(report)


def _show(report: PairsReport) -> None:
    counts = report.counts
    lost = {reason.replace("_", " "): n for reason, n in counts.dropped.items() if n}
    facts(
        "pairs",
        [
            ("rollouts", counts.rollouts),
            *((f"  left out: {why}", n) for why, n in report.left_out.items() if n),
            *([("  not scored", counts.rollouts_unscored)] if counts.rollouts_unscored else []),
            *((name.replace("_", " "), n) for name, n in report.comparisons.items() if n),
            ("groups", counts.groups),
            *([("  fewer than two scored", counts.groups_too_small)] if counts.groups_too_small else []),
            ("  without variance", counts.groups_without_variance),
            ("candidates", counts.candidates),
            *((f"  dropped: {reason}", n) for reason, n in lost.items()),
            ("pairs", counts.pairs),
            *((f"{_SIDES.get(side, side)} pairs" if report.heldout is not None else "written to", _at(report, side))
              for side in report.files),
        ],
    )  # fmt: skip


def _at(report: PairsReport, side: str) -> str:
    table = report.table if side == "train" or report.heldout is None else report.heldout
    return f"{table.num_rows:,} in {report.files[side]}" if report.heldout is not None else str(report.files[side])
