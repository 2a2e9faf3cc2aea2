"""Settings of ``gymdata pairs``."""

from __future__ import annotations

from typing import Literal

import pydantic

from gymdata.settings import Config, Names


class PairsConfig(Config):
    """How pairs are made from scored rollouts.

    ``reward``: a named part of the reward, or a re-scoring beside the rollouts; the total reward when not given.
    ``source``: ``comparisons`` takes the rewards of a judge's comparisons (``judge``: which, when there are several) and
    makes only pairs that they bear out: judged in both positions with the same winner, or with ``order`` ``any`` not judged
    the other way round.
    ``fork``: a pair's prompt goes on to where the two rollouts part, so that what they share is trained on neither side.
    ``strategy``: ``best-worst`` (one pair a group), ``all`` (every two of a group), ``adjacent`` (neighbours in rank).
    ``min_margin``: a pair's scores differ by more than this. ``max_pairs_per_task`` keeps the widest margins.
    ``length_balance``: the largest share of pairs, among those of unequal length, whose chosen side is the longer one.
    ``split``: the share of tasks whose pairs go to a held-out file.
    ``breaks``: rollouts with breaks or branches stop the command (``refuse``) or are left out (``drop``).
    ``target_agents``: only the turns of these agents are trained, those of others are context; pairs in which one side has
    no such turn are left out.
    ``keep_duplicates``: pairs with the same prompt, chosen and rejected ids as another are made all the same; by default
    one of them is.
    ``truncated``: pairs with a truncated rollout are made (``keep``) or left out (``drop``).
    """

    reward: str | None = None
    source: Literal["comparisons"] | None = None
    judge: str | None = None
    order: Literal["consistent", "any"] | None = None
    fork: bool | None = None
    strategy: Literal["best-worst", "all", "adjacent"] = "best-worst"
    min_margin: float = pydantic.Field(0.0, ge=0.0, allow_inf_nan=False)
    max_pairs_per_task: int | None = pydantic.Field(None, ge=1)
    length_balance: float | None = pydantic.Field(None, ge=0.0, le=1.0)
    split: float | None = pydantic.Field(None, gt=0.0, lt=1.0)
    seed: int = 0
    breaks: Literal["refuse", "drop"] = "refuse"
    truncated: Literal["keep", "drop"] = "keep"
    keep_duplicates: bool = False
    target_agents: Names = ()
