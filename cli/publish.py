"""``gymdata push`` and ``gymdata pull``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gymdata.errors import UsageError

from .console import Watch, finish
from .flags import DryRun, Json, Output, Overwrite

_Path = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run or stage folder, or a file of rollouts or pairs that a command wrote."),
]
_Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="hf:ORG/NAME, hf:ORG/NAME@BRANCH, or a new local folder.")
]
_Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="hf:ORG/NAME, hf:ORG/NAME@REVISION, or a folder that was pushed to.")
]
_Public = Annotated[bool, typer.Option("--public", help="Make a new data set public (default: private).")]
_AllowFindings = Annotated[
    bool, typer.Option("--allow-findings", help="Publish although `gymdata scan` finds something.")
]


def push(
    path: _Path,
    target: _Target,
    public: _Public = False,
    allow_findings: _AllowFindings = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Files go as they are, with a card, run.json and plain columns for the Hub's viewer, in one commit. What a scan finds
    is refused. The same command again sends only what is missing. --overwrite adds to a data set of something else.
    """
    from gymdata.publish.push import push as run

    with Watch("push") as watch:
        report = run(
            path,
            target,
            public=public,
            allow_findings=allow_findings,
            overwrite=overwrite,
            write=not dry_run,
            progress=watch,
        )
    return finish(report, "push", json=json)


def pull(source: _Source, output: Output = None, json: Json = False) -> int:
    """The folder appears when every file is there and matches its run.json; the same command again resumes."""
    from gymdata.publish.pull import pull as run

    if output is None:
        raise UsageError("-o is missing", hint="-o FOLDER is where the data set is written")
    with Watch("pull") as watch:
        report = run(source, output, progress=watch)
    return finish(report, "pull", json=json)
