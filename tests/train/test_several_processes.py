"""How one of several training processes ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_process_ends_though_a_library_s_thread_does_not(tmp_path: Path) -> None:
    """What failed is reported and the exit code is its own; nothing waits for a thread that waits for another process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    )
    (tmp_path / "job.json").write_text(json.dumps({"num_processes": 2}))
    words = [sys.executable, "-m", "gymdata.train.trainers.run", str(tmp_path / "job.json")]
    environment = os.environ | {"RANK": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3
    assert "trainer: KeyError: 'output'" in done.stdout
