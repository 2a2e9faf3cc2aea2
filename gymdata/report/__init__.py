"""``gymdata report``: what a run, a stage or a model amounts to, as one page."""
