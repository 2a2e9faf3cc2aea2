"""``gymdata mix``: parts of several runs or files, by weight, as one output."""
