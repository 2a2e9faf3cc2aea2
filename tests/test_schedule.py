"""What is recorded of a run of the tests, so that an interrupted one goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.schedule import Recorder, by_group, group_of


@pytest.mark.parametrize("mark", [None, "spread", "engine"])
@pytest.mark.parametrize("nodeid", ["tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c[d@e-f]"])
def test_a_passed_test_is_recorded_by_the_name_that_it_is_collected_by(
    nodeid: str, mark: str | None, tmp_path: Path
) -> None:
    """xdist reports it with its group behind the name."""
    item: Any = SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name == mark)
    recorder = Recorder(skip_passed=True)
    recorder.passed = tmp_path / "passed"
    for when in ("setup", "call", "teardown"):
        report: Any = SimpleNamespace(nodeid=f"{nodeid}@{group_of(item)}", when=when, failed=False, duration=1.0)
        recorder.pytest_runtest_logreport(report)
    assert recorder.passed.read_text() == f"{nodeid}\n"
    assert recorder.seconds == {"tests/a/test_b.py": 3.0}


def test_the_parts_do_not_depend_on_the_order_of_the_files() -> None:
    """Every process collects a set of its own, and refuses to run with another one that chose other tests."""
    files = [("engine", "a.py"), ("engine", "b.py"), ("engine", "c.py")]
    seconds = {"a.py": 0.1, "b.py": 0.2, "c.py": 0.3}
    assert by_group(files, seconds)["engine"] == by_group(files[::-1], seconds)["engine"]
