"""``gymdata score``: rewards of saved rollouts."""
