"""``gymdata pairs``: preference pairs."""
