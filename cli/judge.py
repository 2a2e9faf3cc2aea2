"""``gymdata judge``."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from gymdata.commands.judge.settings import JudgeConfig
from gymdata.errors import GymdataError

from .console import Watch, command_words, finish
from .flags import Json, with_flags

#: The published name of the negation is shorter than the option's.
PRINCIPLE = {"use_principle": ["--use-principle/--no-principle"]}


@with_flags(JudgeConfig, PRINCIPLE)
def judge(
    settings: JudgeConfig,
    path: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder, file or glob of rollouts.")] = None,
    json: Json = False,
) -> int:
    """Writes comparisons, rewards and a bias report."""
    from gymdata.commands.judge import run as judging
    from gymdata.scores.chosen import judge_folders

    with Watch("judge") as watch:
        summary = judging.judge(config=settings, progress=watch, command=command_words())
    then = f"pairs {shlex.quote(settings.path)} --from comparisons"
    try:
        judge_folders([settings.path], None)
    except GymdataError:  # there are comparisons of several judges
        then += f" --judge {shlex.quote(summary.name)}"
    return finish(summary, "judge", json=json, then=then)
