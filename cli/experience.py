"""``gymdata experience``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymdata.experience.settings import ExperienceConfig

from .console import Watch, command_words, emit_json, facts, warn_once
from .flags import Json, Output, Overwrite, RunFiles, with_flags

if TYPE_CHECKING:
    from gymdata.experience.build import ExperiencesReport


@with_flags(ExperienceConfig, {"lam": ["--lambda", "--lam"]})
def experience(
    path: RunFiles,
    output: Output = None,
    *,
    settings: ExperienceConfig,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Each token that was generated gets one advantage."""
    from gymdata.experience.run import experience as run

    with Watch("experiences") as watch:
        report = run(path, output, config=settings, overwrite=overwrite, command=command_words(), progress=watch)
    warn_once(report.notes)
    if json:
        emit_json(report.to_dict())
    else:
        _show(report)


def _show(report: ExperiencesReport) -> None:
    counts = report.counts
    facts(
        f"experiences ({report.estimator}, {report.score})",
        [
            ("rollouts", counts["rollouts"]),
            *((f"  left out: {why.replace('_', ' ')}", n) for why, n in report.left_out.items()),
            ("groups", counts["groups"]),
            *((f"  dropped: {why.replace('_', ' ')}", len(ids)) for why, ids in report.dropped_groups.items()),
            ("sequences", counts["sequences"]),
            *([("  rollouts cut into several", counts["rollouts_cut"])] if counts["rollouts_cut"] else []),
            *([("  abandoned turns dropped", counts["abandoned_turns"])] if counts["abandoned_turns"] else []),
            ("trained tokens", counts["trained_tokens"]),
            ("advantage, mean", report.advantage["mean"]),
            ("advantage, std", report.advantage["std"]),
            ("written to", report.path),
        ],
    )  # fmt: skip
