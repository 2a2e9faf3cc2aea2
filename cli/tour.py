"""``gymdata tour``: real rollouts and six questions, one after the other; then the viewer."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .console import finish, note, paragraphs, say, stdout
from .flags import Json

_Output = Annotated[
    Path, typer.Option("-o", "--output", help="Folder for the rollouts (default: runs/tour).", show_default=False)
]
_View = Annotated[
    bool | None,
    typer.Option("--view/--no-view", help="Serve the rollouts to a browser at the end (default: on a terminal)."),
]
_Browser = Annotated[bool, typer.Option("--no-browser", help="Print the viewer's address; open no browser.")]
_Port = Annotated[int, typer.Option("--port", help="Port of the viewer; 0 selects a free one.")]
_NEXT = "Next: gymdata docs your-data, gymdata docs your-reward, gymdata demo"


def tour(
    output: _Output = Path("runs/tour"),
    view: _View = None,
    no_browser: _Browser = False,
    port: _Port = 0,
    json: Json = False,
) -> int:
    """Copies 300 rollouts that come with gymdata, answers six questions about them with a command each, and opens the
    viewer. Needs no model, no GPU and no network.
    """
    from gymdata.commands.tour.run import prepare
    from gymdata.commands.tour.run import tour as whole

    if json:
        return finish(whole(output), "tour", json=True)
    report, steps = prepare(output), []
    say(f"{report.rollouts} rollouts of 25 tasks by a tiny policy.")
    say("vLLM sampled them before and after a round of training.")
    say(f"They are in {report.output}; to remove them: rm -r {shlex.quote(str(report.output))}")
    for number, step in enumerate(report.steps, 1):
        say(f"\n{number}/{len(report.steps)}  {step.question}\n$ {step.command}")
        # The command on this terminal, so that its answer is shown as it would be.
        steps.append(step.run())
        paragraphs(f"\n{step.look_at}")
    say(f"\nThe same in the browser, with every token to click on:\n$ {report.view}")
    code = finish(replace(report, steps=steps), lambda: say(_NEXT), json=False)
    if stdout().isatty() and sys.stdin.isatty() if view is None else view:
        from gymdata.commands.view.run import view as serve

        def opened(text: str) -> None:
            note(text)
            if not no_browser and not webbrowser.open(text.removeprefix("open ").split()[0]):
                note("no browser was found: open the address yourself")

        serve(report.output, say=opened, port=port, tokenizer=report.output / "tokenizer")
    return code
