"""``gymdata import`` and ``gymdata export``: rows of the formats in ``gymdata/formats/``, read and written."""
