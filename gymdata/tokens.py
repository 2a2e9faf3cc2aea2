"""Token maths: how turns are stored, given back, continued, checked and joined into sequences. Numpy and Arrow, no I/O.

A ``Turn`` is a dict with ``parent``, ``prefix_length``, ``prompt_delta_ids``, ``generation_token_ids``,
``generation_log_probs`` and ``digest``; a rollout's turns are a list of them, in the order in which they were sampled.
``Ragged``: lists of different lengths as flat values and offsets.

Encoding: ``Call`` (one model call: whole prompt, generation, log-probs) → ``encode_turns`` → turns, prompts as deltas.
Expanding: ``expand_prompts`` (one rollout), ``with_prompts`` (a column of turns). ``turn_digest`` proves a turn unchanged.
Breaks: ``kinds`` and ``count_breaks`` (does each turn extend what came before?), ``relations`` (where it does not, and why:
``cause_of_break`` gives T200 to T204), ``common_prefix``.
Sequences: ``stitch`` (a column of turns: ``RolloutSequences``) gives ids, loss masks and log-probs.
Next prompts: ``next_prompt`` from ids held and ``bridge_ids``; ``splice`` where messages were rendered again, and
``splice_published``, the reference form of it.

Invariant: a generated token has mask 1 in exactly one sequence of its rollout.
"""

from __future__ import annotations

from gymdata.checks.breaks import Cause, Relation, cause_of_break, relations
from gymdata.rollouts.next_prompt import SpliceRefusedError, bridge_ids, next_prompt, splice, splice_published
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.sequences import RolloutSequences, SampledTokens, Sequences, stitch
from gymdata.rollouts.turn_columns import with_prompts
from gymdata.rollouts.turns import (
    Call,
    Turn,
    common_prefix,
    count_breaks,
    encode_turns,
    expand_prompts,
    kinds,
    turn_digest,
)

__all__ = [
    "Call",
    "Cause",
    "Ragged",
    "Relation",
    "RolloutSequences",
    "SampledTokens",
    "Sequences",
    "SpliceRefusedError",
    "Turn",
    "bridge_ids",
    "cause_of_break",
    "common_prefix",
    "count_breaks",
    "encode_turns",
    "expand_prompts",
    "kinds",
    "next_prompt",
    "relations",
    "splice",
    "splice_published",
    "stitch",
    "turn_digest",
    "with_prompts",
]
