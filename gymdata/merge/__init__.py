"""``gymdata merge``: rollouts of several runs of one kind as one."""
