"""``gymdata train-…``: the trainers."""
