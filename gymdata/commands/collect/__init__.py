"""``gymdata collect``: rollouts of tasks. Every field of ``settings`` is a flag or a key of ``--set``."""
