"""``gymdata collect``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, Watch, emit_json, facts, prints_apart

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
        str | None, typer.Option("-m", "--model", help="Model or LoRA folder, or the served name.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Base URL of a vLLM server, with or without /v1.")] = None,
    chat_endpoint: Annotated[
        str | None,
        typer.Option(help="Base URL of a server that takes chat messages only; it must return token ids."),
    ] = None,
    workflow_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Whole rollouts come from here: it is sent a task and answers with messages."),
    ] = None,
    on_break: Annotated[
        str | None,
        typer.Option(help="keep (default) or fail: rollouts whose prompt the server did not read as it was sampled."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer folder, when the model is not a local one.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Chat template to use in place of the model's.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="How tool calls are parsed (default: auto).")] = None,
    keep_reasoning: Annotated[
        bool | None,
        typer.Option(
            "--keep-reasoning/--no-keep-reasoning",
            help="Replace a chat template that rewrites earlier turns by its known form that does not (default).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Run folder, resumed when it is there (default: runs/TASKS-TIME)."),
    ] = None,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Only the first N tasks.")] = None,
    num_rollouts: Annotated[
        int | None, typer.Option("-r", "--num-rollouts", help="Rollouts a task (default 1).")
    ] = None,
    concurrency: Annotated[int | None, typer.Option("-c", "--concurrency", help="Rollouts in flight.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (default 1.0; 0 is greedy).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Below 1, log-probabilities become biased.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Above 0, log-probabilities become biased.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Above 0, log-probabilities become biased.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens a turn (default 1024).")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Model calls a rollout (default 16).")] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer (default: the engine's).")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds a rollout; then it is truncated.")] = None,
    seed: SeedFlag = None,
    top_logprobs: Annotated[int | None, typer.Option(metavar="K", help="Keep the K best alternatives a token.")] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="path.py:Name, a Python class or functions; or a resource server's URL."),
    ] = None,
    tool_timeout: Annotated[float | None, typer.Option(help="Seconds a tool call may take (default 60).")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help=REWARD_HELP,
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Instead of a drawn one.")] = None,
    policy_version: Annotated[
        int | None, typer.Option(help="Raise it when a served model changes (default 0).")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Failed attempts a rollout may have (default 3).")] = None,
    give_up: Annotated[bool, typer.Option("--give-up", help="Exit 0 although rollouts are missing.")] = False,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Count bad task rows and go on.")] = False,
    rows_per_file: Annotated[int | None, typer.Option(help="Seal a file every so many rows.")] = None,
    format: Annotated[str | None, typer.Option(help="parquet (default) or jsonl.")] = None,
    config: ConfigFile = None,
    set_: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start and write nothing.")] = False,
    as_json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks of errors.")] = False,
) -> int:
    """Sample rollouts of tasks with a policy, token ids and log-probabilities kept; resumes what is there."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "set_", "dry_run", "as_json", "verbose")}
    switches = ("give_up", "skip_bad_rows", "overwrite")
    overrides = {k: v for k, v in flags.items() if v is not None and not (k in switches and not v)}

    from gymdata.collect import run as collecting
    from gymdata.collect.settings import CollectConfig

    resolved = CollectConfig.load(config, overrides, set_)
    if dry_run:
        with prints_apart():
            planned = collecting.plan(config=resolved)
        if as_json:
            emit_json(planned)
        else:
            facts("Dry run: nothing was started or written", collecting.plan_table(planned))
        return 0
    with Watch("collect") as watch:
        summary = collecting.collect(config=resolved, progress=watch, command=f"gymdata {shlex.join(sys.argv[1:])}")
    if as_json:
        emit_json(summary.to_dict())
    else:
        facts("Rollouts", summary.table())
    return summary.exit_code
