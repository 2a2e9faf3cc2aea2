"""``gymdata train-sft``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from gymdata_cli.console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, Watch, emit_json, facts


def train_sft(
    rollouts: Annotated[str, typer.Argument(metavar="RUN", help="Rollouts: a run folder, a file or a glob.")],
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Model folder; a LoRA folder goes on training.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the trained model.")] = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006
    select: Annotated[
        str | None, typer.Option(help="best (of each group, default), above (all with a reward) or all.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut longer sequences; prints what that costs.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter (--set lora_r=16 …).")] = False,
    num_processes: Annotated[
        int | None, typer.Option(help="Processes that share the work (accelerate launch).")
    ] = None,
    seed: SeedFlag = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in -o.")] = False,
    overwrite: OverwriteFlag = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, count and prove the batches; train nothing.")
    ] = False,
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")] = False,
) -> None:
    """Train on the exact tokens of the best rollouts.

    Every setting of transformers' TrainingArguments and TRL's ModelConfig is a key of --config and --set.
    """
    from gymdata.api.training import train_sft as run

    flags = {
        "select": select,
        "min_reward": min_reward,
        "max_length": max_length,
        "num_processes": num_processes,
        "seed": seed,
        "use_peft": lora or None,
    }
    with Watch("training") as watch:
        result = run(
            rollouts, model, output, config=config, settings=flags, sets=sets, resume=resume, overwrite=overwrite,
            dry_run=dry_run, progress=watch, command=["gymdata", *sys.argv[1:]],
        )  # fmt: skip
    if json:
        emit_json(result)
        return
    proof = result["trained_tokens"]
    counts = result["counts"]
    rows = [
        ("rollouts", counts["rollouts"]),
        ("  chosen", counts["rollouts_chosen"]),
        ("sequences", counts["sequences"]),
        ("trained tokens an epoch", proof["file"]["count"]),
        ("batches equal the file", proof["equal"]),
        ("steps", result.get("steps")),
    ]
    facts("train-sft" + (" (dry run)" if dry_run else ""), [*rows, ("output", result["config"]["output"])])
