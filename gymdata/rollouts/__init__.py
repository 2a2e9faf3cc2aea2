"""The kernel: tables, turns, breaks and their checks; pure.

``schema``: every table. ``turns``: one rollout's model calls, encoded, rebuilt, and cut into chains. ``ragged``: lists of
different lengths. ``turn_columns``: turns of many rollouts. ``sequences``: what is trained, stitched from turns.
``next_prompt``: the prompt after a turn. ``breaks``, ``chat_text``: where a prompt rewrites what was sampled, and why.
``checks``, ``violations``: validation. ``repair``: rollouts without their faults. ``messages``: chat messages, tasks,
Responses items. ``logprobs``: how far two models are apart.
"""
