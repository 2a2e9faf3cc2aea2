"""``gymdata report``: a run, a stage or a model as one page. ``page`` says which charts there are, ``charts`` draws them."""
