"""The sequences of one rollout, turn by turn: what the stitcher of whole batches must give."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from gymdata.rollouts.turns import Turn, chains, expand_prompts


class TokenSequence(NamedTuple):
    """``input_ids``, ``loss_mask`` and ``logprobs`` have one value per token; ``turn_starts``, ``turns`` and ``trained`` one
    per turn."""

    input_ids: Any
    loss_mask: Any
    logprobs: Any
    turn_starts: Any
    turns: list[int]
    trained: list[bool]
    abandoned: bool


def sequences(
    turns: Sequence[Turn], abandoned: Literal["keep", "drop"] = "keep", unread: Collection[int] = ()
) -> list[TokenSequence]:
    """A generation has mask 1 in exactly one sequence; all else has mask 0 and log-probability 0."""
    prompts = expand_prompts(turns, check_digests=False)
    result = []
    for chain in chains(turns, prompts, abandoned, unread):
        leaf = chain.turns[-1]
        ids = np.concatenate((prompts[leaf], np.asarray(turns[leaf]["generation_token_ids"], np.int32)))
        mask, logprobs = np.zeros(len(ids), np.int8), np.zeros(len(ids), np.float32)
        starts = np.asarray([len(prompts[turn]) for turn in chain.turns], np.int32)
        for turn, start, is_trained in zip(chain.turns, starts.tolist(), chain.trained, strict=True):
            if is_trained:
                end = start + len(turns[turn]["generation_token_ids"])
                mask[start:end] = 1
                logprobs[start:end] = turns[turn]["generation_log_probs"]
        result.append(TokenSequence(ids, mask, logprobs, starts, chain.turns, chain.trained, chain.abandoned))
    return result
