"""Flags that mean the same in ``judge`` and ``serve-genrm``; the published names where there are some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Genrm = Annotated[str | None, typer.Option("--genrm", metavar="MODEL", help="Judge to run in this process.")]
Endpoint = Annotated[str | None, typer.Option("--endpoint", metavar="URL", help="Judge behind /v1/chat/completions.")]
Model = Annotated[str | None, typer.Option("-m", "--model", metavar="NAME", help="Of the served judge.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--judge-prompt", help="Jinja file for a judge without the roles; 'default' is the shipped one."),
]
Principle = Annotated[str | None, typer.Option("--principle", help="By which the judge decides.")]
UsePrinciple = Annotated[
    bool | None,
    typer.Option("--use-principle/--no-principle", help="Show one to the judge, or never (default: only --principle)."),
]
Show = Annotated[
    str | None, typer.Option("--show", help="final (answer only, default) or transcript (with tool calls and results).")
]
Constrain = Annotated[
    str | None,
    typer.Option("--constrain", help="Hold the judge to the verdict's JSON schema: auto (default), on, off."),
]
Strategy = Annotated[str | None, typer.Option("--comparison-strategy", help="circular, all_pairs or both_orders.")]
Judges = Annotated[int | None, typer.Option("--num-judges-per-comparison", help="Judgements a comparison (default 1).")]
Aggregator = Annotated[
    str | None, typer.Option("--aggregator-method", help="simple_tiebreaker (default), win_rate or bradley_terry.")
]
ReasoningBonus = Annotated[float | None, typer.Option("--reasoning-bonus", help="For the shortest reasoning on top.")]
AnswerBonus = Annotated[float | None, typer.Option("--answer-bonus", help="For the shortest answer on top.")]
TopPercentile = Annotated[float | None, typer.Option("--top-percentile", help="Share that is the top (default 0.2).")]
ReasoningCoefficient = Annotated[
    float | None, typer.Option("--group-reasoning-length-penalty-coeff", help="Weight of reasoning length (default 0).")
]
AnswerCoefficient = Annotated[
    float | None, typer.Option("--group-answer-length-penalty-coeff", help="Weight of answer length (default 0).")
]
StyleCoefficient = Annotated[
    float | None, typer.Option("--group-style-penalty-coeff", help="Weight of style density (default 0).")
]
DefaultScore = Annotated[float | None, typer.Option("--default-score", help="Default 3.0.")]
DefaultRanking = Annotated[float | None, typer.Option("--default-ranking", help="Default 3.5.")]
ParseRetries = Annotated[int | None, typer.Option("--genrm-parse-retries", help="Tries after the first (default 3).")]
ParseSleep = Annotated[
    float | None, typer.Option("--genrm-parse-retry-sleep-s", help="Seconds between them (default 0.2).")
]
Verdicts = Annotated[str | None, typer.Option("--verdicts", help="strict (default) or published.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Of the judge (default 0.6).")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Of the judge (default 0.95).")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Of a judgement (default: what fits).")]
RequestTimeout = Annotated[float | None, typer.Option("--request-timeout", help="Seconds a request (default 300).")]
Concurrency = Annotated[int | None, typer.Option("-c", "--concurrency", help="Judgements in flight.")]
