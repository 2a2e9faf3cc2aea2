"""``gymdata report``: a run, a stage or a model as one page. ``charts`` has a file per chart, ``drawing`` draws them."""
