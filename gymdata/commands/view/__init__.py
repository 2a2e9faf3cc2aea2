"""``gymdata view``: rollouts, and everything made from them, in the browser."""
