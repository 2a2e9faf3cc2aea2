"""``gymdata scan``: keys, tokens, e-mail addresses and home folders in rollouts, and a copy without them.

``patterns``: what is looked for. ``files``: where. ``run``: the command. ``redact``: rollouts without what was found.
"""
