"""``gymdata train-…``: the trainers. ``settings`` says what each takes; ``trainers.<algorithm>`` has its loss."""
