"""``gymdata pairs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, command_words, finish, warn_once

_Path = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of scored rollouts.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Folder or .parquet/.jsonl file to write.")]
_Reward = Annotated[
    str | None, typer.Option("--reward", help="Named reward or re-scoring to use (default: the total reward).")
]
_From = Annotated[
    str | None,
    typer.Option("--from", help="Source of preferences: rewards or comparisons of `gymdata judge` (default: rewards)."),
]
_Judge = Annotated[str | None, typer.Option("--judge", help="Judge whose comparisons are used, if there are several.")]
_Order = Annotated[
    str | None, typer.Option("--order", help="consistent (both positions agree) or any (default: consistent).")
]
_Fork = Annotated[bool | None, typer.Option("--fork", help="Extend prompts to where the two rollouts diverge.")]
_Strategy = Annotated[
    str | None, typer.Option("--strategy", help="Pairing strategy: best-worst, all or adjacent (default: best-worst).")
]
_Margin = Annotated[
    float | None, typer.Option("--min-margin", help="Minimum score difference, exclusive (default: 0).")
]
_Cap = Annotated[
    int | None, typer.Option("--max-pairs-per-task", help="Keep the pairs with the largest margins, up to N per task.")
]
_Balance = Annotated[
    float | None, typer.Option("--length-balance", help="Maximum share of pairs whose longer completion is chosen.")
]
_Split = Annotated[float | None, typer.Option("--split", help="Share of tasks held out.")]
_Breaks = Annotated[
    str | None, typer.Option("--breaks", help="Rollouts with breaks: refuse or drop (default: refuse).")
]
_Truncated = Annotated[
    str | None, typer.Option("--truncated", help="Pairs with a truncated rollout: keep or drop (default: keep).")
]
_Copies = Annotated[
    bool, typer.Option("--keep-duplicates", help="Keep pairs with identical token IDs (default: drop them).")
]
_Agents = Annotated[str | None, typer.Option("--target-agents", help="Train only the turns of these agents: a,b.")]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")]


def pairs(
    path: _Path,
    output: _Output = None,
    reward: _Reward = None,
    from_: _From = None,
    judge: _Judge = None,
    order: _Order = None,
    fork: _Fork = None,
    strategy: _Strategy = None,
    min_margin: _Margin = None,
    max_pairs_per_task: _Cap = None,
    length_balance: _Balance = None,
    split: _Split = None,
    seed: SeedFlag = None,
    breaks: _Breaks = None,
    truncated: _Truncated = None,
    keep_duplicates: _Copies = False,
    target_agents: _Agents = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
    verbose: _Verbose = False,
) -> int:
    """Build preference pairs from scored rollouts, with the saved token IDs and masks."""
    from gymdata.pairs.run import build_pairs
    from gymdata.pairs.settings import PairsConfig

    names = ("reward", "strategy", "min_margin", "max_pairs_per_task", "length_balance", "split", "seed", "breaks")
    given = locals()
    flags = {name: given[name] for name in (*names, "judge", "order", "fork", "truncated", "target_agents")}
    flags["keep_duplicates"] = keep_duplicates or None
    flags["source"] = None if from_ in (None, "rewards", "reward") else from_
    settings = PairsConfig.load(config, flags, sets)
    report = build_pairs(path, output=output, config=settings, overwrite=overwrite, command=command_words())
    warn_once(report.notes)
    return finish(report, "pairs", json=json)
