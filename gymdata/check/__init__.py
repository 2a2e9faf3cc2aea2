"""``gymdata check``: a chat template or a server, before anything is sampled."""
