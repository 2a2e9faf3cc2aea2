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
    host: Annotated[str | None, typer.Option(help="Address to serve on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port (default 8000; 0 takes a free one).")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name by which others reach this server; repeatable (default: loopback, host)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to keep what was judged (default: nothing is kept).")
    ] = None,
    num_rollouts_per_prompt: Annotated[int | None, typer.Option(help="Members of a cohort (default 16).")] = None,
    cohort_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for its members (default 600).")] = None,
    on_judge_failure: Annotated[str | None, typer.Option(help="error (503, default) or default-score.")] = None,
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
    max_body_bytes: Annotated[int | None, typer.Option(help="Bytes per request (default 33554432).")] = None,
    max_responses: Annotated[int | None, typer.Option(help="Responses per /compare request (default 256).")] = None,
    max_depth: Annotated[int | None, typer.Option(help="Levels of nesting per request (default 100).")] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Members waiting for their cohorts (default 16384).")] = None,
    workers: Annotated[int | None, typer.Option(help="More than 1 is refused: a cohort lives in one process.")] = None,
    config: ConfigFile = None,
    set_: SetFlag = [],  # noqa: B006 - typer copies it
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks of errors.")] = False,
) -> None:
    """Serve pairwise judging over HTTP: /compare, /verify, /health and /metrics."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "set_", "verbose")}

    from gymdata.judge.serve import run as serving
    from gymdata.judge.settings import ServeConfig

    resolved = ServeConfig.load(config, flags, set_)
    serving.serve_genrm(resolved, say=note, command=command_words())
