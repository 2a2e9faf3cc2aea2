"""``gymdata collect``: rollouts of tasks."""
