"""What every test may count on: no network, no telemetry, calm libraries, and no stopwatch."""

from __future__ import annotations

import os

import hypothesis

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait make two busy processes on two cores many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A slow machine is no failure: what an example takes is never what a test is about.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("untimed")

pytest_plugins = ["tests.engine_fixtures"]
