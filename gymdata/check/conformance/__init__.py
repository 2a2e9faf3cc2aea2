"""``gymdata check --recorder``: whether a recorder keeps what schemas/SPEC.md asks for, proven against an engine whose every
sample is known. Nothing of ``gymdata record`` is used here."""
