"""A package that adds one format, one reward, one pair strategy and one loss to gymdata, each by one file and one line of
``entry_points.txt`` (in pyproject.toml: ``[project.entry-points."gymdata.formats"]`` and so on)."""
