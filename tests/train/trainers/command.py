"""The command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def gymdata(*words: object) -> Any:
    """Run the command in its own process, as a user does."""
    code = "import sys; from gymdata.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
