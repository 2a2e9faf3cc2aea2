"""``gymdata ls``: the runs and stage outputs below a folder."""
