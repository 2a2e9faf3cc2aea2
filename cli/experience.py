"""``gymdata experience``."""

from __future__ import annotations

from gymdata.commands.experience.settings import ExperienceConfig

from .console import Watch, command_words, finish, warn_once
from .flags import Json, Output, Overwrite, RunFiles, with_flags


@with_flags(ExperienceConfig, {"lam": ["--lambda", "--lam"]})
def experience(
    path: RunFiles,
    output: Output = None,
    *,
    settings: ExperienceConfig,
    overwrite: Overwrite = False,
    json: Json = False,
) -> int:
    """Each token that was generated gets one advantage.

    Exit code 1 when all groups are dropped; nothing is written then.
    """
    from gymdata.commands.experience.run import experience as run

    with Watch("experiences") as watch:
        report = run(path, output, config=settings, overwrite=overwrite, command=command_words(), progress=watch)
    warn_once(report.notes)
    title = f"experiences ({report.estimator}, {report.score})"
    return finish(report, title, json=json, then="train-rl {} -m MODEL -o POLICY")
