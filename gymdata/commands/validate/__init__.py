"""``gymdata validate``: the linter of rollouts and pairs. Here files become columns, which
``gymdata.checks`` reads."""
