"""``gymdata show``."""

from __future__ import annotations

from typing import Annotated

import typer

from gymdata.commands.show.settings import ShowConfig

from .console import finish, note, stdout
from .flags import Json, with_flags

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, pairs folder, file or glob.")]
_Id = Annotated[
    str | None, typer.Argument(metavar="ROLLOUT_ID", help="A rollout's ID, or its beginning (default: first).")
]
_Tokens = Annotated[bool, typer.Option("--tokens", help="Also show sampled tokens, colored by logprob.")]


@with_flags(ShowConfig, file=False)
def show(
    path: _Run, rollout_id: _Id = None, *, settings: ShowConfig, tokens: _Tokens = False, json: Json = False
) -> int:
    """Messages by role, tool calls, rewards, tokens, and what is wrong with a rollout. Works on a run in progress."""
    from gymdata.commands.show.run import show as choose

    shown = choose(path, rollout_id, config=settings)

    def render() -> None:
        from gymdata.commands.show.report import console_for, render

        render(shown, tokens=tokens, console=console_for(stdout()))
        number = 1 if shown.pair else len(shown.rollouts)
        if shown.by_default and shown.total > number:
            flags = "--pair ID" if shown.pair else "ROLLOUT_ID, -n N, --task ID, --best, --worst or --random N"
            note(f"{number:,} of {shown.total:,} {'pairs' if shown.pair else 'rollouts'}: {flags} shows others")
        if tokens and shown.reading is None:
            note("the tokenizer of these tokens is not known here: --tokenizer FOLDER shows their text")

    return finish(shown, render, json=json)
