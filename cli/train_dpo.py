"""``gymdata train-dpo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from gymdata_cli.console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, Watch, emit_json, facts, note


def train_dpo(
    pairs: Annotated[str, typer.Argument(help="Pairs: a file, a folder of `gymdata pairs`, or a glob.")],
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Model folder; a LoRA folder goes on training.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the trained model.")] = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006
    ref: Annotated[
        str | None, typer.Option(help="Reference log-probs: model (computed) or saved (the sampler's own).")
    ] = None,
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
    """Train with DPO on the exact tokens of saved pairs.

    Every setting of TRL's DPOConfig and ModelConfig is a key of --config and --set, as --set learning_rate=1e-5.
    """
    from gymdata.api.pairing import pairs_of_run
    from gymdata.api.training import train_dpo as run

    found = pairs_of_run(pairs)
    if found is not None:
        note(f"pairs: {', '.join(map(str, found))}")

    flags = {
        "ref": ref,
        "max_length": max_length,
        "num_processes": num_processes,
        "seed": seed,
        "use_peft": lora or None,
    }
    with Watch("training") as watch:
        result = run(
            pairs, model, output, config=config, settings=flags, sets=sets, resume=resume, overwrite=overwrite,
            dry_run=dry_run, progress=watch, command=["gymdata", *sys.argv[1:]],
        )  # fmt: skip
    if json:
        emit_json(result)
        return
    proof = result["trained_tokens"]
    rows = [("pairs", result["counts"]["pairs"]), ("trained tokens an epoch", proof["file"]["count"])]
    rows += [("batches equal the file", proof["equal"]), ("steps", result.get("steps"))]
    facts("train-dpo" + (" (dry run)" if dry_run else ""), [*rows, ("output", result["config"]["output"])])
