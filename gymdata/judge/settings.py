"""Settings of ``gymdata judge`` and ``gymdata serve-genrm``, with the published names where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from gymdata.errors import UsageError
from gymdata.settings import Config
from gymdata.urls import JUDGE_KEYS, refuse_userinfo

DEFAULT_PRINCIPLE = "Prefer the response that is correct, answers what was asked, and says no more than is needed."


class GenrmConfig(Config):
    """What judging is made of. Times are seconds, lengths are tokens.

    ``genrm``: folder of a judge whose chat template has the roles principle, response_1 and response_2, run in this
    process. ``endpoint`` and ``model``: one that is served behind /v1/chat/completions. ``judge_prompt``: a Jinja file
    for a model without those roles, or ``default`` for the shipped one. ``principle``: shown to the judge;
    ``use_principle`` true shows one always, false never; left out, one is shown where ``principle`` gives it.
    ``show``: what the judge sees of a response, its ``final`` answer or the ``transcript`` with tool calls and results;
    reasoning never.
    ``genrm_parse_retries``: further tries when an answer holds no verdict; ``retries``: further tries of a request that
    failed. ``verdicts``: ``strict`` takes no impossible or missing number; ``published`` fills in the defaults.
    ``constrain``: hold the judge to the verdict's JSON schema: ``on``, ``off``, or ``auto``: where an endpoint can (it
    lets a judge reason first), and not in this process.
    """

    genrm: str | None = None
    endpoint: str | None = None
    model: str | None = None
    judge_prompt: Path | None = None
    principle: str | None = None
    use_principle: bool | None = None
    show: Literal["final", "transcript"] = "final"
    constrain: Literal["auto", "on", "off"] = "auto"

    temperature: float = pydantic.Field(0.6, ge=0.0)
    top_p: float = pydantic.Field(0.95, gt=0.0, le=1.0)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    seed: int = pydantic.Field(0, ge=0, lt=2**63)
    concurrency: int | None = pydantic.Field(None, ge=1)
    request_timeout: float = pydantic.Field(300.0, gt=0.0)
    retries: int = pydantic.Field(5, ge=0)
    retry_pause: float = pydantic.Field(0.5, ge=0.0)
    engine: dict[str, Any] = pydantic.Field(default_factory=dict)

    comparison_strategy: Literal["circular", "all_pairs", "both_orders"] = "circular"
    num_judges_per_comparison: int = pydantic.Field(1, ge=1)
    genrm_parse_retries: int = pydantic.Field(3, ge=0)
    genrm_parse_retry_sleep_s: float = pydantic.Field(0.2, ge=0.0)
    verdicts: Literal["strict", "published"] = "strict"
    default_score: float = pydantic.Field(3.0, allow_inf_nan=False)
    default_ranking: float = pydantic.Field(3.5, allow_inf_nan=False)

    aggregator_method: Literal["simple_tiebreaker", "win_rate", "bradley_terry"] = "simple_tiebreaker"
    reasoning_bonus: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)
    answer_bonus: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)
    top_percentile: float = pydantic.Field(0.2, ge=0.0, le=1.0)
    group_reasoning_length_penalty_coeff: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)
    group_answer_length_penalty_coeff: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)
    group_style_penalty_coeff: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)

    @pydantic.field_validator("endpoint")
    @classmethod
    def _no_userinfo(cls, url: str | None) -> str | None:
        refuse_userinfo(url, "--endpoint", JUDGE_KEYS)
        return url

    def checked(self) -> GenrmConfig:
        """This, or UsageError when it names no judge or two."""
        if (self.genrm is None) == (self.endpoint is None):
            raise UsageError(
                "no judge given" if self.genrm is None else "two judges given: --genrm and --endpoint",
                hint="--genrm MODEL for one in this process, or --endpoint URL --model NAME",
            )
        return self

    def adjustments(self) -> dict[str, float]:
        """The bonuses and coefficients, by their published names."""
        names = (
            "reasoning_bonus",
            "answer_bonus",
            "top_percentile",
            "group_reasoning_length_penalty_coeff",
            "group_answer_length_penalty_coeff",
            "group_style_penalty_coeff",
        )
        return {name: getattr(self, name) for name in names}

    def principle_for(self, given: str | None) -> str | None:
        """The principle that the judge is shown for a request that brought ``given``. As published, none unless the
        settings ask for one; then the request's own comes first."""
        shown = self.principle is not None if self.use_principle is None else self.use_principle
        return (given or self.principle or DEFAULT_PRINCIPLE) if shown else None


class JudgeConfig(GenrmConfig):
    """``gymdata judge``. ``limit``: only the first so many groups. ``name``: of the comparisons and of the rewards."""

    given_as: ClassVar[Mapping[str, str]] = {"path": "the run as the argument"}

    path: str
    output: Path | None = None
    name: str | None = pydantic.Field(None, pattern=r"^[\w.+-]+$")
    comparison_strategy: Literal["circular", "all_pairs", "both_orders"] = "both_orders"
    limit: int | None = pydantic.Field(None, ge=1)
    aggregate_only: bool = False
    retry_unparsed: bool = False
    overwrite: bool = False


class ServeConfig(GenrmConfig):
    """``gymdata serve-genrm``. ``cohort_timeout``: seconds from a cohort's first member to the end of waiting for the
    others. ``on_judge_failure``: answer 503 (``error``) or the default score, marked (``default-score``). ``output``: the
    folder for comparisons, verdicts and answered rewards; what is there is used again after a restart. Without it nothing
    is kept on disk.

    ``allow_host``: names in a request's Host header that are taken beside the loopback names and the address served on.
    Limits: ``max_body_bytes`` and ``max_depth`` (levels of nesting) of a request, ``max_responses`` of a /compare,
    ``max_waiting`` members of cohorts that are not full.
    """

    host: str = "127.0.0.1"
    port: int = pydantic.Field(8000, ge=0, le=65535)
    allow_host: list[str] = pydantic.Field(default_factory=list)
    output: Path | None = None
    num_rollouts_per_prompt: int = pydantic.Field(16, ge=1)
    cohort_timeout: float = pydantic.Field(600.0, gt=0.0)
    on_judge_failure: Literal["error", "default-score"] = "error"
    workers: int = pydantic.Field(1, ge=1)
    max_body_bytes: int = pydantic.Field(32 * 1024**2, ge=1)
    max_depth: int = pydantic.Field(100, ge=1)
    max_responses: int = pydantic.Field(256, ge=1)
    max_waiting: int = pydantic.Field(16_384, ge=1)
