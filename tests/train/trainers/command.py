"""The command, whose trainer is a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
from subprocess import CompletedProcess
from unittest import mock

from gymdata.cli.main import main


def gymdata(*words: object) -> CompletedProcess[str]:
    """Run the command here, where torch is loaded already; what trains is the process that the command starts."""
    out, err = io.StringIO(), io.StringIO()
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with mock.patch.dict(os.environ, threads), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, words)])
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())
