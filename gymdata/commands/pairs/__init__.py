"""``gymdata pairs``: preference pairs. ``select`` has the strategies; ``settings`` has their names for the command line."""
