"""``python -m gymdata``: the same as the ``gymdata`` script."""

from gymdata.cli.main import run

run()
