"""``gymdata eval``: rollouts of a model on tasks, and what they say of it."""
