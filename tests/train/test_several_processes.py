"""How one of several processes of a training ends, and what it may do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_process_ends_though_a_library_s_thread_does_not(tmp_path: Path) -> None:
    """The exit code is its own; nothing waits for a thread that waits for another process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    )
    words = [sys.executable, "-m", "gymdata", "train-sft", str(tmp_path / "none"), "-m", "m", "-o", str(tmp_path / "o")]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "no such file" in done.stderr) == (2, True)
