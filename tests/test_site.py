"""The documentation as a site: it builds, with no link that leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every topic, the README, all commands, settings and public names are pages of it."""
    pytest.importorskip("material")
    words = ["build", "--strict", "--quiet", "-f", str(ROOT / ".github/site/mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "mkdocs", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = {name: (tmp_path / name / "index.html").read_text() for name in ("commands", "settings", "api", "your-data")}
    assert "train-dpo" in text["commands"]
    assert "min_margin" in text["settings"]
    assert "gymdata.load_experiences" in text["api"]
