"""``gymdata query``: SQL over every file."""
