"""Settings of ``gymdata judge`` and ``gymdata serve-genrm``, with the published names where there are some."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic

from gymdata.errors import UsageError
from gymdata.settings import Config, OnlyWith, RayAddress, ReplicaNeeds, ServerUrls, Settings, Switch

if TYPE_CHECKING:
    from gymdata.genrm.aggregate import Adjustments

DEFAULT_PRINCIPLE = "Prefer the response that is correct, answers what was asked, and says no more than is needed."


class GenrmConfig(Config):
    """Settings of the judge and of aggregation. Times are seconds, lengths are tokens."""

    key_only: ClassVar[Set[str]] = frozenset({"retries", "retry_pause", "engine", "replica"})
    sections: ClassVar[Mapping[str, str]] = {
        "genrm": "Judge",
        "temperature": "Sampling",
        "concurrency": "Requests",
        "comparison_strategy": "Comparisons",
        "aggregator_method": "Rewards",
        "path": "Output",
        "host": "Server",
    }
    only_with: ClassVar[OnlyWith] = {
        **dict.fromkeys(("replicas", "engine"), ("{genrm}", lambda c: c.genrm is not None)),
        **dict.fromkeys(("ray", "replica"), ("{replicas}", lambda c: c.replicas is not None)),
    }

    genrm: str | None = pydantic.Field(None, description="Judge model to run in this process.")
    replicas: int | None = pydantic.Field(
        None, ge=1, description="Engines of --genrm on Ray (default: one engine in process)."
    )
    ray: RayAddress = None
    endpoint: ServerUrls = pydantic.Field(
        default_factory=list,
        description="URL of a judge served at /v1/chat/completions, or @FILE of several; repeatable.",
    )
    model: str | None = pydantic.Field(None, description="Judge model name on the server.")
    judge_prompt: Path | None = pydantic.Field(
        None, description="Jinja prompt for judges without the GenRM roles; 'default' is the shipped one."
    )
    principle: str | None = pydantic.Field(None, description="Judging criterion (rubric).")
    use_principle: bool | None = pydantic.Field(
        None, description="Include a principle in the judge prompt (default: only with --principle)."
    )
    show: Literal["final", "transcript"] = pydantic.Field(
        "final", description="What the judge sees: final answer or transcript with tool calls."
    )
    constrain: Switch = pydantic.Field(
        "auto", description="Constrain decoding to the verdict's JSON schema; auto does so on an endpoint."
    )

    temperature: float = pydantic.Field(0.6, ge=0.0, description="Sampling temperature of the judge.")
    top_p: float = pydantic.Field(0.95, gt=0.0, le=1.0, description="Nucleus sampling of the judge.")
    max_tokens: int | None = pydantic.Field(
        None, ge=1, description="Maximum tokens per judgement (default: what fits)."
    )
    seed: int = pydantic.Field(0, ge=0, lt=2**63, description="Random seed.")
    concurrency: int | None = pydantic.Field(None, ge=1, description="Maximum judgements in flight.")
    request_timeout: float = pydantic.Field(300.0, gt=0.0, description="Seconds per request.")
    wait_for_server: float = pydantic.Field(
        600.0, ge=0.0, description="Seconds to wait for a judge server that stops answering."
    )
    retries: int = pydantic.Field(5, ge=0, description="Retries after a transient failure.")
    retry_pause: float = pydantic.Field(0.5, ge=0.0, description="Seconds before the first of these retries.")
    engine: Settings = pydantic.Field(
        default_factory=dict, description="vLLM engine arguments of --genrm, passed through."
    )
    replica: ReplicaNeeds = pydantic.Field(default_factory=dict)

    comparison_strategy: Literal["circular", "all_pairs", "both_orders"] = pydantic.Field(
        "circular", description="Pairs of rollouts to compare."
    )
    num_judges_per_comparison: int = pydantic.Field(1, ge=1, description="Judgements per comparison.")
    genrm_parse_retries: int = pydantic.Field(3, ge=0, description="Retries of an unparsable verdict.")
    genrm_parse_retry_sleep_s: float = pydantic.Field(0.2, ge=0.0, description="Seconds between these retries.")
    verdicts: Literal["last", "published"] = pydantic.Field(
        "last",
        description="Verdict that counts: the last of a finished answer, or by the published order and defaults.",
    )
    default_score: float = pydantic.Field(3.0, allow_inf_nan=False, description="Score without a verdict.")
    default_ranking: float = pydantic.Field(3.5, allow_inf_nan=False, description="Ranking without a verdict.")

    aggregator_method: Literal["simple_tiebreaker", "win_rate", "bradley_terry"] = pydantic.Field(
        "simple_tiebreaker", description="How judgements become rewards."
    )
    reasoning_bonus: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Bonus for the shortest reasoning in the top share."
    )
    answer_bonus: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Bonus for the shortest answer in the top share."
    )
    top_percentile: float = pydantic.Field(0.2, ge=0.0, le=1.0, description="Top share that is eligible for a bonus.")
    group_reasoning_length_penalty_coeff: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Weight of the reasoning length penalty."
    )
    group_answer_length_penalty_coeff: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Weight of the answer length penalty."
    )
    group_style_penalty_coeff: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Weight of the style density penalty."
    )

    def checked(self) -> GenrmConfig:
        """This, or UsageError unless it names one judge."""
        hint = "--genrm MODEL for one in this process, or --endpoint URL --model NAME"
        if (self.genrm is None) == (not self.endpoint):
            raise UsageError(
                "no judge given" if self.genrm is None else "two judges given: --genrm and --endpoint", hint=hint
            )
        if self.endpoint and self.model is None:
            raise UsageError(
                "--endpoint names no judge without --model", hint="--model NAME, as URL/v1/models lists it"
            )
        return self

    def adjustments(self) -> Adjustments:
        """The bonuses and coefficients."""
        from gymdata.genrm.aggregate import Adjustments

        return Adjustments(**{field.name: getattr(self, field.name) for field in fields(Adjustments)})

    def principle_for(self, requested: str | None) -> str | None:
        """The principle that the judge is shown for a request that brought ``requested``. As published: none unless the
        settings enable principles; then the request's own has precedence."""
        shown = self.principle is not None if self.use_principle is None else self.use_principle
        return (requested or self.principle or DEFAULT_PRINCIPLE) if shown else None


class JudgeConfig(GenrmConfig):
    """``gymdata judge``."""

    given_as: ClassVar[Mapping[str, str]] = {"path": "the run as the argument"}
    key_only: ClassVar[Set[str]] = GenrmConfig.key_only | {"default_score", "default_ranking"}

    path: str = pydantic.Field(description="Run folder, file or glob of rollouts.")
    output: Path | None = pydantic.Field(None, description="Output folder (default: RUN/judge-NAME).")
    name: str | None = pydantic.Field(
        None, pattern=r"^[\w.+-]+$", description="Name of the comparisons and rewards (default: the judge's)."
    )
    comparison_strategy: Literal["circular", "all_pairs", "both_orders"] = pydantic.Field(
        "both_orders", description="Pairs of rollouts to compare."
    )
    limit: int | None = pydantic.Field(None, ge=1, description="Judge only the first N groups.")
    aggregate_only: bool = pydantic.Field(False, description="Re-aggregate existing verdicts; no judge calls.")
    retry_unparsed: bool = pydantic.Field(False, description="Retry comparisons without a parsable verdict.")
    overwrite: bool = pydantic.Field(False, description="Start over, replacing existing output.")


class ServeConfig(GenrmConfig):
    """``gymdata serve-genrm``."""

    host: str = pydantic.Field("127.0.0.1", description="Address to listen on.")
    port: int = pydantic.Field(8000, ge=0, le=65535, description="Port; 0 selects a free one.")
    allow_host: list[str] = pydantic.Field(
        default_factory=list, description="Allowed Host header; repeatable (default: loopback and --host)."
    )
    wait_for_server: float = pydantic.Field(
        15.0, ge=0.0, description="Seconds to wait for a judge server that stops answering."
    )
    output: Path | None = pydantic.Field(
        None, description="Folder for the verdicts, used again after a restart (default: not saved)."
    )
    num_rollouts_per_prompt: int = pydantic.Field(16, ge=1, description="Rollouts per cohort.")
    cohort_timeout: float = pydantic.Field(600.0, gt=0.0, description="Seconds to wait for a complete cohort.")
    on_judge_failure: Literal["error", "default-score"] = pydantic.Field(
        "error", description="On judge failure: error (503), or the default score, marked."
    )
    max_body_bytes: int = pydantic.Field(32 * 1024**2, ge=1, description="Maximum bytes per request.")
    max_depth: int = pydantic.Field(100, ge=1, description="Maximum nesting depth per request.")
    max_responses: int = pydantic.Field(256, ge=1, description="Maximum responses per /compare request.")
