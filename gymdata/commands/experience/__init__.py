"""``gymdata experience``: sequences with advantages and returns."""
