"""What a run of the tests takes, and in which order and parts it goes: a plugin of pytest (see ``tests/conftest.py``).

Every run writes ``runs/durations.json``: test file → seconds. The next one starts with the longest files, so that no
process is left alone with one at the end; a fresh clone goes by ``tests/durations.json``. Tests of a file stay together on
a process, and those that share an engine or a wheel. ``--part 2/4`` runs a quarter of the files, by the shipped record,
``--at-most 2.5`` the files that take no longer than 2.5 seconds, and
``--skip-passed`` leaves out what passed on the same sources, for a long run that was interrupted. Of a test with the mark
``matrix(CASE, …)`` the named cases are its representatives; all others are ``full``. The tests of a file with the mark
``spread`` take minutes each and share little: every one may run on another process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs"
DURATIONS, SHIPPED = RUNS / "durations.json", Path(__file__).parent / "durations.json"
#: Tests with one of these marks share what is costly to start.
SHARED = ("engine", "wheel")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="Run the I-th of N parts of about equal time.")
    parser.addoption("--at-most", type=float, metavar="SECONDS", help="Leave out files that take longer.")
    parser.addoption("--skip-passed", action="store_true", help="Leave out tests that passed on the same sources.")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("skip_passed")), "recorder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that takes too long, or whose own marks leave out all of its tests, is not even imported: torch, transformers
    and an engine take longer to import than most files take to run."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
        return None
    limit, chosen = config.getoption("at_most"), config.getoption("markexpr")
    if limit and recorded(SHIPPED).get(str(collection_path.relative_to(ROOT)), 0.0) > limit:
        return True
    left_out = set(chosen.split()) - {"not", "and"} if re.fullmatch(r"not \w+( and not \w+)*", chosen) else set()
    marks = re.search(r"^pytestmark = .*", collection_path.read_text(), re.MULTILINE) if left_out else None
    return True if marks and left_out & set(re.findall(r"\bmark\.(\w+)", marks[0])) else None


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def group_of(item: pytest.Item) -> str:
    # Without brackets: what follows the last one in a report's name is the group.
    alone = re.sub(r"[\[\]@]", "-", item.nodeid) if item.get_closest_marker("spread") else file_of(item.nodeid)
    return next((name for name in SHARED if item.get_closest_marker(name)), alone)


@functools.cache
def recorded(*files: Path) -> dict[str, float]:
    """Seconds by test file; later records over earlier ones."""
    seconds: dict[str, float] = {}
    for file in files:
        if file.is_file():
            seconds |= json.loads(file.read_text())
    return seconds


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix is not None and item.callspec.id not in matrix.args:  # type: ignore[attr-defined]
            item.add_marker("full")
    files = {(group_of(item), file_of(item.nodeid)) for item in items}
    if part := config.getoption("part"):
        index, count = map(int, part.split("/"))
        chosen = parts(by_group(files, recorded(SHIPPED)), count)[index - 1]
        items[:] = [item for item in items if group_of(item) in chosen]
    if config.getoption("skip_passed") and passed_file().is_file():
        passed = set(passed_file().read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in passed]
    seconds = by_group(files, recorded(SHIPPED, DURATIONS))
    items.sort(key=lambda item: (-seconds[group_of(item)], group_of(item)))
    for item in items:
        group = group_of(item)
        item.add_marker(pytest.mark.xdist_group(group))
        if config.getoption("loadgroup", False) and hasattr(item, "_id"):
            # xdist 3.8 writes the group behind a name that pytest 9.2 no longer reads, and every test would be a group of
            # its own: an engine in each process (https://github.com/pytest-dev/pytest-xdist/issues/1386).
            item._id = item.id.parse(f"{item.nodeid}@{group}")


def by_group(files: Collection[tuple[str, str]], seconds: dict[str, float]) -> Counter[str]:
    """The seconds of each group of (group, file): a file without a record counts as one second, and one whose tests are in
    several groups as much in each as its share."""
    groups, n_groups = Counter[str](), Counter(file for _, file in files)
    # A sum of floats depends on its order, and every process must choose the same parts.
    for group, file in sorted(files):
        groups[group] += seconds.get(file, 1.0) / n_groups[file]
    return groups


def parts(seconds: Counter[str], count: int) -> list[set[str]]:
    """Groups in ``count`` sets of about equal time: each goes, the longest first, where least is."""
    chosen, sums = [set[str]() for _ in range(count)], [0.0] * count
    for group, time in sorted(seconds.items(), key=lambda entry: (-entry[1], entry[0])):
        least = sums.index(min(sums))
        chosen[least].add(group)
        sums[least] += time
    return chosen


def passed_file() -> Path:
    """Where the names of passed tests are kept, by the content of the sources."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout

    content = hashlib.blake2b(git("rev-parse", "HEAD") + git("diff", "HEAD"), digest_size=8).hexdigest()
    return RUNS / "passed" / f"{content}.txt"


class Recorder:
    """Seconds by file, and the names of what passed, as the reports come in."""

    def __init__(self, skip_passed: bool) -> None:
        self.seconds, self.bad = Counter[str](), set[str]()
        self.passed = passed_file() if skip_passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid = report.nodeid.rpartition("@")[0] if "@" in report.nodeid.rpartition("]")[2] else report.nodeid
        self.seconds[file_of(nodeid)] += report.duration
        if report.failed:
            self.bad.add(nodeid)
        if report.when == "teardown" and nodeid not in self.bad and self.passed is not None:
            self.passed.parent.mkdir(parents=True, exist_ok=True)
            with self.passed.open("a") as names:
                names.write(f"{nodeid}\n")

    def pytest_sessionfinish(self, session: Any) -> None:
        if len(self.seconds) > 1:
            RUNS.mkdir(exist_ok=True)
            seconds = recorded(DURATIONS) | {file: round(time, 1) for file, time in self.seconds.items()}
            lines = ",\n".join(f'  "{file}": {time}' for file, time in sorted(seconds.items()))
            DURATIONS.write_text(f"{{\n{lines}\n}}\n")
