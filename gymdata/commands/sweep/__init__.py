"""``gymdata sweep``: a grid of settings and seeds over a chain of commands, and what came of each."""
