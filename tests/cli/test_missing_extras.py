"""Commands without the optional part that they need: one line that names it, never a defect."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.forks import Forks, forks, run

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
POLICY, BROKEN = str(ROOT / "sample_data" / "policy"), str(ROOT / "sample_data" / "rollouts" / "broken.jsonl")
TASKS = str(ROOT / "sample_data" / "tasks" / "train.jsonl")


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks("gymdata.cli.main", "gymdata.commands.train.settings", "gymdata.commands.collect.settings") as processes:
        yield processes


def run_without(missing: list[str], words: list[str], folder: Path, output: Path) -> int:
    """A command, in a fork, where some modules are as if they were not installed."""
    real = PathFinder.find_spec
    PathFinder.find_spec = staticmethod(lambda name, *a: None if name.split(".")[0] in missing else real(name, *a))
    return run(words, output)


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("torch,transformers", ["audit", BROKEN, "-m", POLICY], "train"),
        ("vllm", ["collect", TASKS, "-m", POLICY, "-o", "OUT", "--dry-run"], "cpu"),
        ("ray", ["collect", TASKS, "-m", POLICY, "-o", "OUT", "--replicas", "2"], "ray"),
        ("trl", ["train-sft", BROKEN, "-m", POLICY, "-o", "OUT"], "train"),
    ],
)
def test_a_missing_extra_is_one_line(
    processes: Forks, missing: str, words: list[str], extra: str, tmp_path: Path
) -> None:
    """The command ends with 2, names the module and the extra that brings it, and writes nothing."""
    modules, shown = missing.split(","), tmp_path / "shown"
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert processes.start(run_without, modules, words, tmp_path, shown).wait() == 2, shown.read_text()
    text = shown.read_text()
    assert "which is not installed" in text
    assert f"'{modules[0]}'" in text
    assert f"[{extra}" in text
    assert "defect" not in text
    assert not (tmp_path / "out").exists()
