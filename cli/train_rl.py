"""``gymdata train-rl``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from gymdata_cli.console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, Watch, emit_json, facts


def train_rl(
    experiences: Annotated[str, typer.Argument(help="Experiences: a file, a folder of `gymdata experience`, a glob.")],
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Model folder; a LoRA folder goes on training.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the trained model.")] = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006
    loss: Annotated[str | None, typer.Option(help="ppo_clip (default), cispo or tis_reinforce.")] = None,
    kl_beta: Annotated[float | None, typer.Option(help="Weight of the KL (k3) to the reference (default 0).")] = None,
    allow_biased_logprobs: Annotated[
        bool, typer.Option("--allow-biased-logprobs", help="Train though the saved log-probs are biased (L304).")
    ] = False,
    max_length: Annotated[int | None, typer.Option(help="Cut longer sequences; prints what that costs.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter (--set lora_r=16 …).")] = False,
    num_processes: Annotated[
        int | None, typer.Option(help="Processes that share the work (accelerate launch).")
    ] = None,
    seed: SeedFlag = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in -o.")] = False,
    overwrite: OverwriteFlag = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, prove the batches, print the ratio; train nothing.")
    ] = False,
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")] = False,
) -> None:
    """Train with batch RL on saved experiences: their ids, log-probs and advantages.

    Every setting of transformers' TrainingArguments and TRL's ModelConfig is a key of --config and --set, as are the bounds
    of the losses: --set clip_high=0.28.
    """
    from gymdata.api.training import train_rl as run

    flags = {
        "loss": loss,
        "kl_beta": kl_beta,
        "allow_biased_logprobs": allow_biased_logprobs or None,
        "max_length": max_length,
        "num_processes": num_processes,
        "seed": seed,
        "use_peft": lora or None,
    }
    with Watch("training") as watch:
        result = run(
            experiences, model, output, config=config, settings=flags, sets=sets, resume=resume, overwrite=overwrite,
            dry_run=dry_run, progress=watch, command=["gymdata", *sys.argv[1:]],
        )  # fmt: skip
    if json:
        emit_json(result)
        return
    proof = result["trained_tokens"]
    ratio = result["ratio"]
    rows = [
        ("sequences", result["counts"]["sequences"]),
        ("trained tokens an epoch", proof["file"]["count"]),
        ("batches equal the file", proof["equal"]),
        ("ratio before training, mean", ratio["mean"]),
        ("  effective sample size", f"{ratio['effective_sample_size']:.1%}"),
        ("steps", result.get("steps")),
    ]
    facts("train-rl" + (" (dry run)" if dry_run else ""), [*rows, ("output", result["config"]["output"])])
