"""``gymdata status``: how far runs are, and how fast they go on."""
