"""``gymdata collect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import (
    ConfigFile,
    JsonFlag,
    OverwriteFlag,
    SeedFlag,
    SetFlag,
    Watch,
    command_words,
    finish,
    prints_apart,
)

REWARD_HELP = (
    "NAME[:ARG][=WEIGHT], path.py:function[=WEIGHT] or the URL of a reward server; repeatable. exact_match, numeric, "
    "math_verify: the task column answer. regex: regex:PATTERN, or the column pattern. json_schema: json_schema:FILE, or "
    "the column schema. A function gets prompts, completions (text for tasks with a text prompt and no tools, else "
    "messages), completion_ids and the columns."
)


def collect(
    tasks: Annotated[
        str | None, typer.Argument(help="Task file or glob: .jsonl or .parquet, also .gz and .zst.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Model folder, LoRA adapter folder, or served model name.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Base URL of a vLLM server, with or without /v1.")] = None,
    chat_endpoint: Annotated[
        str | None,
        typer.Option(help="Base URL of a server that takes chat messages only; it must return token IDs."),
    ] = None,
    workflow_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Workflow server that runs whole rollouts: it receives tasks and returns messages."
        ),
    ] = None,
    on_break: Annotated[
        str | None,
        typer.Option(
            help="Rollouts whose server-side prompt differs from the sampled tokens: keep or fail (default: keep)."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder, required when the model is not local.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Chat template file that replaces the model's.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Tool call parser (default: auto).")] = None,
    keep_reasoning: Annotated[
        bool | None,
        typer.Option(
            "--keep-reasoning/--no-keep-reasoning",
            help="Patch a known chat template that rewrites earlier turns (default: on).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Run folder; resumed if it exists (default: runs/TASKS-TIME)."),
    ] = None,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Use only the first N tasks.")] = None,
    num_rollouts: Annotated[
        int | None, typer.Option("-r", "--num-rollouts", help="Rollouts per task (default: 1).")
    ] = None,
    concurrency: Annotated[int | None, typer.Option("-c", "--concurrency", help="Maximum rollouts in flight.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (default: 1.0; 0 is greedy).")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling; below 1, logprobs are biased (default: 1.0).")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Top-k sampling; above 0, logprobs are biased (default: 0).")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Min-p sampling; above 0, logprobs are biased (default: 0).")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per turn (default: 1024).")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Maximum model calls per rollout (default: 16).")] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Maximum tokens of prompt and completion (default: the engine's limit).")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds per rollout before it is truncated (default: no limit).")
    ] = None,
    seed: SeedFlag = None,
    top_logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="Record the top K logprobs per token (default: 0).")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="Environment: path.py:Name (Python class or functions) or a resource server's URL."
        ),
    ] = None,
    tool_timeout: Annotated[float | None, typer.Option(help="Seconds per tool call (default: 60).")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help=REWARD_HELP,
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Run ID (default: random).")] = None,
    policy_version: Annotated[
        int | None, typer.Option(help="Policy version; increase it when the served model changes (default: 0).")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Maximum failed attempts per rollout (default: 3).")] = None,
    give_up: Annotated[bool, typer.Option("--give-up", help="Exit with 0 even if rollouts are missing.")] = False,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Count and skip invalid task rows.")] = False,
    rows_per_file: Annotated[int | None, typer.Option(help="Rows per output file.")] = None,
    format: Annotated[str | None, typer.Option(help="File format: parquet or jsonl (default: parquet).")] = None,
    config: ConfigFile = None,
    set_: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; start and write nothing.")] = False,
    as_json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Sample rollouts of tasks with a policy, with token IDs and logprobs; resumes an existing run."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "set_", "dry_run", "as_json", "verbose")}
    switches = ("give_up", "skip_bad_rows", "overwrite")
    overrides = {k: v for k, v in flags.items() if v is not None and not (k in switches and not v)}

    from gymdata.collect import run as collecting
    from gymdata.collect.settings import CollectConfig

    resolved = CollectConfig.load(config, overrides, set_)
    if dry_run:
        with prints_apart():
            planned = collecting.plan(config=resolved)
        return finish(planned, "Dry run: nothing was started or written", json=as_json)
    with Watch("collect") as watch:
        summary = collecting.collect(config=resolved, progress=watch, command=command_words())
    return finish(summary, "Rollouts", json=as_json)
