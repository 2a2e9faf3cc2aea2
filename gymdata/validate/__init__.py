"""``gymdata validate``: the linter of rollouts and pairs."""
