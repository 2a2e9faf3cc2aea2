"""The command line: one thin file per command. Each calls one library function, and prints its report.

Flags are made of the fields of the command's settings class (``gymdata/<command>/settings.py``) by ``flags``; ``main`` has
the list of commands.
"""
