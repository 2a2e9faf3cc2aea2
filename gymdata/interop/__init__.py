"""``gymdata import`` and ``gymdata export``: other projects' formats. ``formats`` says which there are, and who reads and
writes each; ``settings`` has their names for the command line."""
