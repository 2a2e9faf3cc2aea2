"""Settings of ``gymdata experience``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import pydantic

from gymdata.credit.estimators import ALL, DEFAULT, SETTINGS, Estimator
from gymdata.settings import Abandoned, Config, Dtype, Names, OnlyWith, Settings

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal.__getitem__(tuple(ALL))


def _with_estimator(fits: Callable[[Estimator], bool], kind: str = "") -> tuple[str, Callable[[Any], bool]]:
    """What a setting goes with, for ``only_with``: the estimators that fit, or of which ``kind`` they are."""
    fitting, others = _names(fits), _names(lambda estimator: not fits(estimator))
    text = f"an estimator {kind}: not {others}" if kind else f"{{estimator:{fitting}}}"
    return text, lambda c: fits(ALL[c.estimator])


def _names(fits: Callable[[Estimator], bool]) -> str:
    *some, last = (name for name, estimator in ALL.items() if fits(estimator))
    return f"{', '.join(some)} or {last}" if some else last


_OF_ONE_REWARD = _with_estimator(lambda e: e.reads == "reward", "of one reward")
_OF_DISCOUNTS, _discounts = _with_estimator(lambda e: e.discounts, "of discounted returns")
_OF_RETURNS, _returns = _with_estimator(lambda e: e.returns, "of discounted returns")
_Kind = TypeVar("_Kind", bound=Config)
_CLIP = "a number above 0, or a lower and an upper bound: 5 or -1,1"


def _with_estimator_settings(kind: type[_Kind]) -> type[_Kind]:
    """The class with a field for each setting of the estimators."""
    fields: dict[str, Any] = dict(SETTINGS)
    return pydantic.create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **fields)


@_with_estimator_settings
class _Choice(Config):
    estimator: EstimatorName = pydantic.Field(
        DEFAULT, description="Advantage estimator; with --teacher alone: teacher."
    )
    baseline: str | None = pydantic.Field(
        None, description="Scored greedy run (temperature 0) whose reward of the same task is the baseline, for remax."
    )
    reward_parts: Names = pydantic.Field(
        (), description="Named rewards that gdpo normalizes one by one: a,b (default: all parts of the reward)."
    )


class ExperienceConfig(_Choice):
    """How experiences are made from scored rollouts; the formulas are those of ``gymdata.credit``."""

    only_with: ClassVar[OnlyWith] = {
        "overlong_factor": ("{overlong_buffer}", lambda c: c.overlong_buffer is not None),
        "max_new_tokens": ("{overlong_buffer}", lambda c: c.overlong_buffer is not None),
        "clip_filter_eps": ("{clip_filter_weights:True}", lambda c: c.clip_filter_weights),
        "clip_filter_lamda": ("{clip_filter_weights:True}", lambda c: c.clip_filter_weights),
        **{
            name: ("{reference}, {critic} or {teacher}", lambda c: any((c.reference, c.critic, c.teacher)))
            for name in ("device", "dtype", "batch_tokens")
        },
        **{
            name: _with_estimator(lambda e, name=name: name in e.options)  # type: ignore[misc]  # a lambda's default
            for name in SETTINGS
        },
        "reward_parts": _with_estimator(lambda e: e.reads == "parts"),
        "baseline": _with_estimator(lambda e: e.baseline),
        "teacher_coef": ("{teacher}", lambda c: c.teacher is not None or c.estimator == "teacher"),
        "reward": _OF_ONE_REWARD,
        "rewards": ("an estimator that reads rewards of turns", lambda c: not ALL[c.estimator].of_outcomes),
        "overlong_buffer": _OF_ONE_REWARD,
        **dict.fromkeys(
            ("zero_variance", "clip_filter_weights", "reward_norm", "reward_clip"),
            _with_estimator(lambda e: e.reads != "none", "that reads rewards"),
        ),
        "mean_only": ("{normalize_cross_batch:True}", lambda c: c.normalize_cross_batch),
        "lam": ("{estimator:gae}", lambda c: c.estimator == "gae"),
        "kl_horizon": ("{kl_target}", lambda c: c.kl_target is not None),
        "kl_estimator": ("{reference} or {token_columns}", lambda c: c.reference or c.token_columns),
        "gamma": (f"{{kl_coef}}, or {_OF_DISCOUNTS}", lambda c: _discounts(c) or c.kl_coef > 0),
        "discount_unit": (f"{{kl_coef}}, or {_OF_RETURNS}", lambda c: _returns(c) or c.kl_coef > 0),
    }
    sections: ClassVar[Mapping[str, str]] = {
        "estimator": "Estimator",
        "kl_coef": "KL",
        "reward_norm": "Rewards",
        "whiten": "Advantages",
        "zero_variance": "Rollouts",
        "token_columns": "Models and columns",
    }
    key_only: ClassVar[Set[str]] = frozenset(
        {"clip_filter_eps", "clip_filter_lamda", "teacher_coef", *SETTINGS} - {"pass_k"}
    )

    reward: str | None = pydantic.Field(
        None,
        description="Named reward or re-scoring to use (default: the only re-scoring; without one the total reward).",
    )
    rewards: Literal["outcome", "steps", "steps+outcome"] = pydantic.Field(
        "outcome",
        description="Rewards to use: the outcome on the last generated token, steps on the last of each turn, or both.",
    )
    discount_unit: Literal["token", "turn"] = pydantic.Field("token", description="Unit that γ discounts.")
    gamma: float = pydantic.Field(1.0, ge=0.0, le=1.0, description="Discount factor γ.")
    lam: float = pydantic.Field(1.0, ge=0.0, le=1.0, description="λ of GAE.")
    kl_coef: float = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Coefficient of the KL penalty in the reward."
    )
    kl_target: float | None = pydantic.Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="Mean KL per token to steer towards: the summary gives the next --kl-coef.",
    )
    kl_horizon: float = pydantic.Field(
        10_000.0, gt=0.0, allow_inf_nan=False, description="Rollouts over which --kl-target adapts the coefficient."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = pydantic.Field("k1", description="KL estimator.")
    reward_norm: Literal["none", "std", "mean-std"] = pydantic.Field(
        "none", description="Normalize rewards after shaping."
    )
    reward_clip: float | tuple[float, float] | None = pydantic.Field(
        None, description="Clip normalized rewards to [−C, C] or [LOW, HIGH]: C or LOW,HIGH."
    )
    overlong_buffer: int | None = pydantic.Field(
        None, ge=1, description="Soft overlong penalty buffer, in tokens (DAPO)."
    )
    overlong_factor: float = pydantic.Field(1.0, ge=0.0, description="Maximum overlong penalty.")
    max_new_tokens: int | None = pydantic.Field(
        None, ge=1, description="Maximum generation length, if run.json has none."
    )
    clip_filter_weights: bool = pydantic.Field(False, description="Upweight non-degenerate groups.")
    clip_filter_eps: float = pydantic.Field(3.0, gt=0.0, description="Maximum weight of a group with variance.")
    clip_filter_lamda: float = pydantic.Field(1.0, ge=0.0, description="Weight of groups without variance.")
    whiten: bool = pydantic.Field(False, description="Normalize advantages to mean 0, std 1 over all tokens.")
    normalize_cross_batch: bool = pydantic.Field(False, description="Whiten with a floor on the variance.")
    mean_only: bool = pydantic.Field(
        False, description="With --normalize-cross-batch: center only (no variance scaling)."
    )
    advantage_clip: float | None = pydantic.Field(
        None, gt=0.0, description="Clip advantages to this absolute value, as the last step."
    )
    optimal_value_beta: float | None = pydantic.Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="Write optimal_value, β·log mean exp(R/β) over the group, with this β, for train-rl --loss oapl.",
    )
    entropy_ratio: float | None = pydantic.Field(
        None, gt=0.0, le=1.0, description="Train only this share of tokens per rollout, by entropy."
    )
    zero_variance: Literal["drop", "keep"] | None = pydantic.Field(
        None, description="Groups without reward variance (default: drop where the estimator compares rollouts)."
    )
    truncated: Literal["keep", "drop"] = pydantic.Field("keep", description="Truncated rollouts.")
    abandoned: Abandoned = "drop"
    token_columns: Path | None = pydantic.Field(
        None,
        description="Parquet table with rollout_id and any of ref_logprobs, values or entropy: one list per rollout.",
    )
    reference: str | None = pydantic.Field(None, description="Reference model for ref_logprobs, KL and entropy.")
    critic: str | None = pydantic.Field(None, description="Value model (one label) for GAE.")
    teacher: str | None = pydantic.Field(
        None, description="Teacher model: log π_teacher − log π of each sampled token is (or adds to) its advantage."
    )
    teacher_coef: float = pydantic.Field(
        1.0, gt=0.0, allow_inf_nan=False, description="Coefficient of the advantage that the teacher gives."
    )
    device: str | None = pydantic.Field(
        None, description="Device for these models: cpu, cuda or cuda:N (default: cuda if available)."
    )
    dtype: Dtype | None = pydantic.Field(None, description="dtype for these models (default: auto).")
    batch_tokens: int | None = pydantic.Field(None, ge=1, description="Tokens per forward pass (default: 16384).")
    target_agents: Names = pydantic.Field((), description="Train only the turns of these agents: a,b.")

    @property
    def own_settings(self) -> Settings:
        """The settings of the estimator."""
        return {name: getattr(self, name) for name in ALL[self.estimator].options}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _teacher_alone(cls, values: Any) -> Any:
        """With a teacher and no estimator the teacher is the estimator."""
        if isinstance(values, dict) and values.get("teacher") is not None:
            values = {"estimator": "teacher", **values}
        return values

    @pydantic.field_validator("estimator", mode="before")
    @classmethod
    def _dashes(cls, value: Any) -> Any:
        return value.replace("_", "-") if isinstance(value, str) else value

    @pydantic.field_validator("reward_clip", mode="before")
    @classmethod
    def _bounds(cls, value: Any) -> Any:
        """``5`` or ``-1,1``."""
        if isinstance(value, str):
            try:
                parts = [float(part) for part in value.split(",")]
            except ValueError:
                raise ValueError(_CLIP) from None
            if len(parts) > 2:
                raise ValueError(_CLIP)
            return parts[0] if len(parts) == 1 else parts
        return value

    @pydantic.field_validator("reward_clip")
    @classmethod
    def _in_order(cls, value: Any) -> Any:
        low, high = value if isinstance(value, tuple) else (0.0, 1.0 if value is None else value)
        if low >= high:
            raise ValueError(_CLIP)
        return value

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> ExperienceConfig:
        if self.whiten and self.normalize_cross_batch:
            raise ValueError("whiten and normalize_cross_batch are two forms of one thing: choose one")
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target needs a kl_coef above 0 to begin with: it is multiplied")
        if ALL[self.estimator].baseline and self.baseline is None:
            raise ValueError(
                f"estimator {self.estimator} needs a baseline: a scored run of the same tasks with temperature 0"
            )
        if self.estimator == "teacher" and self.teacher is None and self.token_columns is None:
            raise ValueError("estimator teacher needs a teacher model, or token_columns with teacher_logprobs")
        return self
