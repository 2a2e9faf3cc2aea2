"""``gymdata filter``: which rollouts to keep."""
