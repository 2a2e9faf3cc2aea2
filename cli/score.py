"""``gymdata score``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .collect import REWARD_HELP
from .console import ConfigFile, JsonFlag, OverwriteFlag, SetFlag, Watch, command_words, facts, finish, grid

if TYPE_CHECKING:
    from gymdata.score.run import ScoreSummary

#: Flips shown as text; --json has them all.
_SHOWN = 20


def score(
    path: Annotated[str | None, typer.Argument(help="Run folder, file or glob of rollouts.")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=REWARD_HELP),
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option(help="Reward model folder, as written by `gymdata train-reward`.")
    ] = None,
    reward_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Reward server (POST queries, prompts); the mean of several is used."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file that selects and weights rewards by task fields.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer that decodes text for --reward-url (default: the policy's).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of these scores (default: the rewards' names).")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output folder (default: RUN/scores-NAME).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="A score that crosses it counts as a flip (default: 0.5).")
    ] = None,
    reward_timeout: Annotated[float | None, typer.Option(help="Seconds per batch (default: 300).")] = None,
    config: ConfigFile = None,
    set_: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Score saved rollouts again without sampling; earlier scores are kept, and flips are reported."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "set_", "as_json", "verbose")}
    overrides = {k: v for k, v in flags.items() if v is not None and not (k == "overwrite" and not v)}

    from gymdata.score import run as scoring
    from gymdata.score.settings import ScoreConfig

    resolved = ScoreConfig.load(config, overrides, set_)
    with Watch("score") as watch:
        summary = scoring.score(config=resolved, progress=watch, command=command_words())
    return finish(summary, lambda: _show(summary), json=as_json)


def _show(summary: ScoreSummary) -> None:
    flipped = summary.flips["flipped"]
    if flipped:
        columns = ("task_id", "rollout_index", "old", "new", "rollout_id")
        first = f"first {_SHOWN} of {len(flipped):,}" if len(flipped) > _SHOWN else f"{len(flipped):,}"
        grid(columns, [[row[c] for c in columns] for row in flipped[:_SHOWN]], title=f"Flipped ({first})")
    facts("Scores", summary.rows())
