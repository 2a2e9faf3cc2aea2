"""Flags that mean the same in ``judge`` and ``serve-genrm``; the published names where there are some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Genrm = Annotated[str | None, typer.Option("--genrm", metavar="MODEL", help="Judge model to run in this process.")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="URL of a judge served at /v1/chat/completions.")
]
Model = Annotated[str | None, typer.Option("-m", "--model", metavar="NAME", help="Judge model name on the server.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--judge-prompt", help="Jinja prompt for judges without the GenRM roles; 'default' is the shipped one."
    ),
]
Principle = Annotated[str | None, typer.Option("--principle", help="Judging criterion (rubric).")]
UsePrinciple = Annotated[
    bool | None,
    typer.Option(
        "--use-principle/--no-principle",
        help="Include a principle in the judge prompt (default: only with --principle).",
    ),
]
Show = Annotated[
    str | None,
    typer.Option("--show", help="What the judge sees: final answer or transcript with tool calls (default: final)."),
]
Constrain = Annotated[
    str | None,
    typer.Option(
        "--constrain", help="Constrain decoding to the verdict's JSON schema: auto, on or off (default: auto)."
    ),
]
Strategy = Annotated[
    str | None, typer.Option("--comparison-strategy", help="Pairs to compare: circular, all_pairs or both_orders.")
]
Judges = Annotated[
    int | None, typer.Option("--num-judges-per-comparison", help="Judgements per comparison (default: 1).")
]
Aggregator = Annotated[
    str | None,
    typer.Option(
        "--aggregator-method", help="simple_tiebreaker, win_rate or bradley_terry (default: simple_tiebreaker)."
    ),
]
ReasoningBonus = Annotated[
    float | None,
    typer.Option("--reasoning-bonus", help="Bonus for the shortest reasoning in the top share (default: 0)."),
]
AnswerBonus = Annotated[
    float | None, typer.Option("--answer-bonus", help="Bonus for the shortest answer in the top share (default: 0).")
]
TopPercentile = Annotated[
    float | None, typer.Option("--top-percentile", help="Top share that is eligible for a bonus (default: 0.2).")
]
ReasoningCoefficient = Annotated[
    float | None,
    typer.Option("--group-reasoning-length-penalty-coeff", help="Weight of the reasoning length penalty (default: 0)."),
]
AnswerCoefficient = Annotated[
    float | None,
    typer.Option("--group-answer-length-penalty-coeff", help="Weight of the answer length penalty (default: 0)."),
]
StyleCoefficient = Annotated[
    float | None, typer.Option("--group-style-penalty-coeff", help="Weight of the style density penalty (default: 0).")
]
DefaultScore = Annotated[float | None, typer.Option("--default-score", help="Score without a verdict (default: 3.0).")]
DefaultRanking = Annotated[
    float | None, typer.Option("--default-ranking", help="Ranking without a verdict (default: 3.5).")
]
ParseRetries = Annotated[
    int | None, typer.Option("--genrm-parse-retries", help="Retries of an unparsable verdict (default: 3).")
]
ParseSleep = Annotated[
    float | None, typer.Option("--genrm-parse-retry-sleep-s", help="Seconds between these retries (default: 0.2).")
]
Verdicts = Annotated[
    str | None, typer.Option("--verdicts", help="Verdict parsing: strict or published (default: strict).")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature of the judge (default: 0.6).")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling of the judge (default: 0.95).")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Maximum tokens per judgement (default: what fits).")
]
RequestTimeout = Annotated[float | None, typer.Option("--request-timeout", help="Seconds per request (default: 300).")]
Concurrency = Annotated[int | None, typer.Option("-c", "--concurrency", help="Maximum judgements in flight.")]
