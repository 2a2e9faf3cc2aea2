"""What every test may count on: no network, no telemetry, calm libraries, and no stopwatch."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait make two busy processes on two cores many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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


def _no_sync(fd: Any) -> None:
    """A closed file is an error as before."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


# A sync is for a power cut. What a test kills is a process, and its files are there without; a sync of 4 ms and more is half
# the time of what writes a run. Commands in processes of their own sync as ever.
os.fsync = _no_sync

# Helpers whose assertions say what differs.
pytest.register_assert_rewrite("tests.check.matrix", "tests.train.trainers.gradients")
pytest_plugins = ["tests.engine_fixtures"]

#: Tests that share what is costly to start run on one worker, the longest first; the others move by file.
_GROUPS = ("engine", "torch", "wheel")


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups for ``pytest -n 2 --dist loadgroup``: each engine and wheel is made once, two trainings share no core."""

    def rank(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(_GROUPS) if item.get_closest_marker(name)), len(_GROUPS))

    items.sort(key=rank)
    for item in items:
        number = rank(item)
        group = _GROUPS[number] if number < len(_GROUPS) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
        if config.getoption("loadgroup", False) and hasattr(item, "_id"):
            # xdist 3.8 writes the group behind a name that pytest 9.2 no longer reads, and every test would be a group of
            # its own: an engine in each process (https://github.com/pytest-dev/pytest-xdist/issues/1386).
            item._id = item.id.parse(f"{item.nodeid}@{group}")
