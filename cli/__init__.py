"""The command line is a table: one thin file per command, which calls one library function and prints its report.

Flags are made of the fields of the command's settings class (``gymdata/<command>/settings.py``) by ``flags``; ``main`` has
the list of commands.
"""

from gymdata.workers.tuning import rare_collections


def run() -> None:
    """Entry point of the ``gymdata`` script; ends the process with the documented exit code."""
    # Before the parser is imported, of which nothing is garbage.
    with rare_collections():
        from .main import run as run_command

        run_command()
