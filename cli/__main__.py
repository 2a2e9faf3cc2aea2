"""``python -m gymdata_cli``: the same as the ``gymdata`` script."""

from gymdata_cli.main import run

run()
