"""The ids that a rollout really ended with, for rewards that read tokens.

What always holds: they are the saved ones, their digests checked; text is never turned into ids again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gymdata.core.tokens import expand_prompts
from gymdata.errors import OutsideError, RewardError


def last_ids(rollout: Mapping[str, Any]) -> np.ndarray:
    """Prompt and generation of the last turn, as int32; empty where the rollout has no turns.

    Raises DataError (T209, T210) when the turns are not what was collected.
    """
    turns = rollout["turns"]
    if not turns:
        return np.empty(0, np.int32)
    generation = np.asarray(turns[-1]["generation_token_ids"], dtype=np.int32)
    return np.concatenate((expand_prompts(turns)[-1], generation))


def first_prompt_ids(rollout: Mapping[str, Any]) -> np.ndarray:
    """The prompt of the first turn."""
    return np.asarray(rollout["turns"][0]["prompt_delta_ids"], dtype=np.int32)


def without_ids() -> OutsideError:
    """A rollout that came without token ids cannot be scored as it was sampled."""
    return RewardError("T205: the rollout has no token ids")
