"""``gymdata score``."""

from __future__ import annotations

import heapq
import shlex
from typing import Annotated

import typer

from gymdata.commands.score.settings import ScoreConfig
from gymdata.errors import GymdataError

from .console import Watch, command_words, facts, finish, fits, grid
from .flags import Json, with_flags

#: Flips listed in the text output; --json has all.
_SHOWN = 20
#: The fewest characters of an id that are shown where whole ids do not fit.
_SHORTEST = 8


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
    """Earlier scores are kept, and flips are reported."""
    from gymdata.commands.score import run as scoring

    with Watch("score") as watch:
        summary = scoring.score(config=settings, progress=watch, command=command_words())

    def show() -> None:
        if flipped := summary.flips["flipped"]:
            columns = ("task_id", "rollout_index", "old", "new", "rollout_id")
            first = f"largest {_SHOWN} of {len(flipped):,}" if len(flipped) > _SHOWN else f"{len(flipped):,}"
            largest = heapq.nlargest(_SHOWN, flipped, key=lambda row: abs(row["new"] - row["old"]))
            rows = [[row[c] for c in columns] for row in largest]
            if not fits(columns, rows):
                # As many characters as tell the ids apart, and are a name that `show` takes.
                ids, length = {row[-1] for row in rows}, _SHORTEST
                while len({rollout_id[:length] for rollout_id in ids}) < len(ids):
                    length += 1
                rows = [[*row[:-1], row[-1][:length]] for row in rows]
            grid(columns, rows, title=f"Flipped ({first})")
        facts("score", summary.rows())

    # Scores that are not in the run are no choice of its pairs.
    then = (
        f"pairs {shlex.quote(settings.path)}{_chosen(settings.path, summary.name)}" if settings.output is None else ""
    )
    return finish(summary, show, json=json, then=then)
