"""``gymdata check``: a chat template or a server before anything is sampled, a reward before it is used."""
