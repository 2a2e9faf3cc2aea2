"""What every test may count on: no network, no telemetry, and calm libraries."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

if (Path(__file__).parent / "engine_fixtures.py").exists():
    pytest_plugins = ["tests.engine_fixtures"]
