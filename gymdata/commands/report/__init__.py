"""``gymdata report``: a run, a stage or a model as one page. ``charts`` says which charts, ``drawing`` draws them."""
