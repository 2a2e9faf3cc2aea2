"""Settings of ``gymdata pairs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pydantic

from gymdata.commands.pairs.strategies import STRATEGIES
from gymdata.settings import Config, Names, OnlyWith

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = STRATEGIES.literal()


class PairsConfig(Config):
    """How pairs are made from scored rollouts."""

    only_with: ClassVar[OnlyWith] = {
        **dict.fromkeys(("judge", "order"), ("{source:comparisons}", lambda c: c.source == "comparisons")),
        # With comparisons, the judge's scores order the candidates.
        "reward": ("{source:rewards}", lambda c: c.source is None),
    }
    sections: ClassVar[Mapping[str, str]] = {"reward": "Preferences", "fork": "Pairs", "breaks": "Rollouts"}

    reward: str | None = pydantic.Field(
        None,
        description="Named reward or re-scoring to use (default: the only re-scoring; without one the total reward).",
    )
    source: Literal["rewards", "comparisons"] | None = pydantic.Field(
        None,
        description="Source of preferences: rewards, or comparisons of `gymdata judge` (default: rewards).",
    )
    judge: str | None = pydantic.Field(None, description="Judge whose comparisons are used, if there are several.")
    order: Literal["consistent", "any"] | None = pydantic.Field(
        None,
        description="Comparisons that bear out a pair: consistent in both positions, or any (default: consistent).",
    )
    fork: bool | None = pydantic.Field(None, description="Extend prompts to where the two rollouts diverge.")
    strategy: StrategyName = pydantic.Field("best-worst", description=f"Pairing strategy: {STRATEGIES.texts()}.")
    min_margin: float = pydantic.Field(0.0, ge=0.0, description="Minimum score difference, exclusive.")
    max_pairs_per_task: int | None = pydantic.Field(
        None, ge=1, description="Keep the pairs with the largest margins, up to N per task."
    )
    length_balance: float | None = pydantic.Field(
        None, ge=0.0, le=1.0, description="Maximum share of pairs whose longer completion is chosen."
    )
    split: float | None = pydantic.Field(None, gt=0.0, lt=1.0, description="Share of tasks held out.")
    seed: int = pydantic.Field(0, ge=0, description="Random seed.")
    breaks: Literal["refuse", "drop"] = pydantic.Field("refuse", description="Rollouts with breaks or branches.")
    truncated: Literal["keep", "drop"] = pydantic.Field("keep", description="Pairs with a truncated rollout.")
    keep_duplicates: bool = pydantic.Field(
        False, description="Keep pairs with identical token IDs (default: drop them)."
    )
    allow_rendered: bool | None = pydantic.Field(
        None, description="Take rollouts whose token IDs were rendered from text, not sampled (T213)."
    )
    target_agents: Names = pydantic.Field((), description="Train only the turns of these agents: a,b.")

    @pydantic.field_validator("source", mode="before")
    @classmethod
    def _rewards_are_the_default(cls, value: Any) -> Any:
        """The default has a name here; in files it is the absence of comparisons."""
        return None if value in ("rewards", "reward") else value
