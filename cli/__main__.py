"""``python -m gymdata.cli``: the same as the ``gymdata`` script."""

from .main import run

run()
