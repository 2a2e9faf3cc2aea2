"""``gymdata import`` and ``gymdata export``: other projects' formats."""
