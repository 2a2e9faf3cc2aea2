"""``python -m gymdata.cli``: the same as the ``gymdata`` script."""

from . import run

run()
