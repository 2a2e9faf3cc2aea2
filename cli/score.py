"""``gymdata score``."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from gymdata.commands.score.settings import ScoreConfig
from gymdata.errors import GymdataError

from .console import Watch, command_words, finish
from .flags import Json, with_flags


def _chosen(path: str, name: str) -> str:
    """The flag that names this score, where another one could be meant."""
    from gymdata.scores.chosen import default_score

    try:
        default_score([path], None)
    except GymdataError:
        return f" --reward {shlex.quote(name)}"
    return ""


@with_flags(ScoreConfig)
def score(
    settings: ScoreConfig,
    path: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder, file or glob of rollouts.")] = None,
    json: Json = False,
) -> int:
    """Earlier scores are kept."""
    from gymdata.commands.score import run as scoring

    with Watch("score") as watch:
        summary = scoring.score(config=settings, progress=watch, command=command_words())

    # Scores that are not in the run are no choice of its pairs.
    then = (
        f"pairs {shlex.quote(settings.path)}{_chosen(settings.path, summary.name)}" if settings.output is None else ""
    )
    return finish(summary, "score", json=json, then=then)
