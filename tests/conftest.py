"""What every test may count on: no network, no telemetry, calm libraries, and no stopwatch."""

from __future__ import annotations

import os
import signal
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait make two busy processes on two cores many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Shells start a background job with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure: what an example takes is never what a test is about.
# Each setting is written out: hypothesis itself has other defaults where it sees a CI service.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    derandomize=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
# Everywhere else a run may find what the last one did not; there, the same commit has the same verdict.
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("untimed"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "untimed")

#: A test that has one of these fixtures has its mark.
NEEDS = {"vllm_server": "engine", "vllm_sampler": "engine", "chromium": "browser", "store": "store", "nodes": "ray"}


def pytest_itemcollected(item: pytest.Item) -> None:
    for fixture in NEEDS.keys() & set(getattr(item, "fixturenames", ())):
        item.add_marker(NEEDS[fixture])


def _no_sync(fd: Any) -> None:
    """A closed file is an error as before."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


# A sync is for a power cut. What a test kills is a process, and its files are there without; a sync of 4 ms and more is half
# the time of what writes a run. Commands in processes of their own sync as ever.
os.fsync = _no_sync

# Helpers whose assertions say what differs.
pytest.register_assert_rewrite("tests.check.matrix", "tests.train.trainers.running")
pytest_plugins = ["tests.engine_fixtures", "tests.schedule"]


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables in a pipe are as wide as COLUMNS says, which some shells and test runners set."""
    monkeypatch.delenv("COLUMNS", raising=False)
