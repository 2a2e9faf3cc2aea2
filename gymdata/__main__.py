"""``python -m gymdata``: the same as the ``gymdata`` script."""

from gymdata.cli import run

run()
