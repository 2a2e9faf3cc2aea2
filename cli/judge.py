"""``gymdata judge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SeedFlag, SetFlag, Watch, command_words, finish
from .judge_flags import (
    Aggregator,
    AnswerBonus,
    AnswerCoefficient,
    Concurrency,
    Constrain,
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


def judge(
    path: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder, file or glob of rollouts.")] = None,
    genrm: Genrm = None,
    endpoint: Endpoint = None,
    model: Model = None,
    judge_prompt: PromptFile = None,
    principle: Principle = None,
    use_principle: UsePrinciple = None,
    show: Show = None,
    constrain: Constrain = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the comparisons and rewards (default: the judge's).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output folder (default: RUN/judge-NAME).")
    ] = None,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Judge only the first N groups.")] = None,
    comparison_strategy: Strategy = None,
    num_judges_per_comparison: Judges = None,
    aggregate_only: Annotated[
        bool, typer.Option("--aggregate-only", help="Re-aggregate existing verdicts; no judge calls.")
    ] = False,
    retry_unparsed: Annotated[
        bool, typer.Option("--retry-unparsed", help="Retry comparisons without a parsable verdict.")
    ] = False,
    aggregator_method: Aggregator = None,
    reasoning_bonus: ReasoningBonus = None,
    answer_bonus: AnswerBonus = None,
    top_percentile: TopPercentile = None,
    group_reasoning_length_penalty_coeff: ReasoningCoefficient = None,
    group_answer_length_penalty_coeff: AnswerCoefficient = None,
    group_style_penalty_coeff: StyleCoefficient = None,
    genrm_parse_retries: ParseRetries = None,
    genrm_parse_retry_sleep_s: ParseSleep = None,
    verdicts: Verdicts = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    request_timeout: RequestTimeout = None,
    concurrency: Concurrency = None,
    seed: SeedFlag = None,
    config: ConfigFile = None,
    set_: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Compare the rollouts of each group with a judge; writes comparisons, rewards and a bias report."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "set_", "as_json", "verbose")}
    switches = ("aggregate_only", "retry_unparsed", "overwrite")
    overrides = {k: v for k, v in flags.items() if v is not None and not (k in switches and not v)}

    from gymdata.judge import run as judging
    from gymdata.judge.settings import JudgeConfig

    resolved = JudgeConfig.load(config, overrides, set_)
    with Watch("judge") as watch:
        summary = judging.judge(config=resolved, progress=watch, command=command_words())
    return finish(summary, "Judged", json=as_json)
