"""``gymdata show``."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import JsonFlag, emit_json, note


def show(
    path: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, pairs folder, file or glob.")],
    rollout_id: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT_ID]", help="A rollout's ID, or its beginning (default: first).")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="All rollouts of this task.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The rollout with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The rollout with the lowest reward.")] = False,
    random: Annotated[int | None, typer.Option("--random", metavar="N", help="N rollouts at random.")] = None,
    pair: Annotated[
        str | None, typer.Option("--pair", metavar="ID", help="A pair: chosen and rejected from the fork.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show token IDs as text, colored by logprob.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Tokenizer folder (default: that of the model in run.json).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of --random (default: 0).")] = 0,
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")] = False,
) -> None:
    """Show rollouts: messages, tool calls, rewards, tokens, and what is wrong with them. Works on a run in progress."""
    from gymdata.show.run import show as choose

    shown = choose(path, rollout_id, task=task, best=best, worst=worst, random=random, pair=pair, seed=seed,
                   tokenizer=tokenizer)  # fmt: skip
    if json:
        emit_json(shown.to_dict())
        return
    from gymdata.show.report import render

    render(shown, tokens=tokens)
    what = "pairs" if shown.pair is not None else "rollouts"
    if shown.total > 1 and not any((rollout_id, task, best, worst, random, pair)):
        others = "--pair ID" if what == "pairs" else "ROLLOUT_ID, --task ID, --best, --worst or --random N"
        note(f"1 of {shown.total:,} {what}: {others} shows others")
