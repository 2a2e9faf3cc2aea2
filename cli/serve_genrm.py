"""``gymdata serve-genrm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import ConfigFile, SeedFlag, SetFlag, command_words, note
from .judge_flags import (
    Aggregator,
    AnswerBonus,
    AnswerCoefficient,
    Concurrency,
    Constrain,
    DefaultRanking,
    DefaultScore,
    Endpoint,
    Genrm,
    Judges,
    MaxTokens,
    Model,
    ParseRetries,
    ParseSleep,
    Principle,
    PromptFile,
    ReasoningBonus,
    ReasoningCoefficient,
    RequestTimeout,
    Show,
    Strategy,
    StyleCoefficient,
    Temperature,
    TopP,
    TopPercentile,
    UsePrinciple,
    Verdicts,
)


def serve_genrm(
    genrm: Genrm = None,
    endpoint: Endpoint = None,
    model: Model = None,
    judge_prompt: PromptFile = None,
    principle: Principle = None,
    use_principle: UsePrinciple = None,
    show: Show = None,
    constrain: Constrain = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 selects a free one (default: 8000).")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Allowed Host header; repeatable (default: loopback and --host)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the verdicts (default: not saved).")
    ] = None,
    num_rollouts_per_prompt: Annotated[int | None, typer.Option(help="Rollouts per cohort (default: 16).")] = None,
    cohort_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for a complete cohort (default: 600).")
    ] = None,
    on_judge_failure: Annotated[
        str | None, typer.Option(help="On judge failure: error (503) or default-score (default: error).")
    ] = None,
    comparison_strategy: Strategy = None,
    num_judges_per_comparison: Judges = None,
    aggregator_method: Aggregator = None,
    reasoning_bonus: ReasoningBonus = None,
    answer_bonus: AnswerBonus = None,
    top_percentile: TopPercentile = None,
    group_reasoning_length_penalty_coeff: ReasoningCoefficient = None,
    group_answer_length_penalty_coeff: AnswerCoefficient = None,
    group_style_penalty_coeff: StyleCoefficient = None,
    default_score: DefaultScore = None,
    default_ranking: DefaultRanking = None,
    genrm_parse_retries: ParseRetries = None,
    genrm_parse_retry_sleep_s: ParseSleep = None,
    verdicts: Verdicts = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    request_timeout: RequestTimeout = None,
    concurrency: Concurrency = None,
    seed: SeedFlag = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Maximum bytes per request (default: 33554432).")] = None,
    max_responses: Annotated[
        int | None, typer.Option(help="Maximum responses per /compare request (default: 256).")
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="Maximum nesting depth per request (default: 100).")] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Maximum rollouts that wait for their cohort (default: 16384).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Only 1 is supported: a cohort is held by one process.")] = None,
    config: ConfigFile = None,
    set_: SetFlag = [],  # noqa: B006 - typer copies it
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> None:
    """Serve pairwise judging over HTTP: /compare, /verify, /health and /metrics."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "set_", "verbose")}

    from gymdata.judge.serve import run as serving
    from gymdata.judge.settings import ServeConfig

    resolved = ServeConfig.load(config, flags, set_)
    serving.serve_genrm(resolved, say=note, command=command_words())
