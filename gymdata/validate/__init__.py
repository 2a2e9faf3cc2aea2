"""``gymdata validate``: the linter of rollouts and pairs. Here files become columns; codes are in
``gymdata.rollouts.violations``, checks of rollouts in ``gymdata.rollouts.checks``, of behavior and pairs in ``behavior`` and
``pairs``."""
