"""A walk through 300 real rollouts that are installed with gymdata."""
