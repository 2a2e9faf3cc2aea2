"""The kernel: tables, turns and messages; pure.

``schema``: every table. ``turns``: one rollout's model calls, encoded, rebuilt, and cut into chains. ``ragged``: lists of
different lengths. ``turn_columns``: turns of many rollouts. ``sequences``: what is trained, stitched from turns.
``soundness``: what no consumer of token data takes. ``next_prompt``: the prompt after a turn. ``messages``: chat messages,
tasks, Responses items. ``logprobs``: how far two models are apart.
"""
