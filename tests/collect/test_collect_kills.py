"""``gymdata collect`` killed in each state that its files pass through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collect.saved_rows import rows_of
from tests.forks import Forks, forks
from tests.kills import Killed
from tests.servers import ending_as_the_policy

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_data"
_LOADED = [
    "gymdata.cli.collect", "gymdata.commands.collect.run", "transformers.models.auto.tokenization_auto", "aiohttp", "polars",
    "pyarrow.parquet",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ending_as_the_policy() as started:
        yield started.url


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks(*_LOADED) as made:
        yield made


def held(work: Path) -> dict[str, Any]:
    """The run's rows without times, the names of its files, and what run.json counts."""
    run = work / "run"
    facts = json.loads((run / "run.json").read_text())
    counts = {key: facts["counts"].get(key) for key in ("rollouts", "completed", "rewarded", "failures")}
    # Half a line that a kill left is kept aside, as .torn.
    names = sorted(str(path.relative_to(work)) for path in run.rglob("*") if path.suffix != ".torn")
    return {"rows": rows_of(run), "names": names, "counts": counts, "parts": [part["rows"] for part in facts["files"]],
            "identity": facts["identity"]}  # fmt: skip


@pytest.mark.parametrize("form", ["parquet", pytest.param("jsonl", marks=pytest.mark.full)])
def test_a_collect_that_was_killed_anywhere_finishes(form: str, server: str, processes: Forks, tmp_path: Path) -> None:
    """Killed in each state of the files of a run of several parts: the same command ends with every rollout once, and with
    no file more than a run that nobody killed."""
    tasks = str(SAMPLE / "tasks" / "train.jsonl")
    words = ["collect", tasks, "-o", str(tmp_path / "work" / "run"), "-n", "2", "-r", "2", "--reward", "numeric"]
    words += ["--endpoint", server, "-m", "fake", "--tokenizer", str(SAMPLE / "policy"), "--max-tokens", "12"]
    words += ["--seed", "1", "--run-id", "killed", "--rows-per-file", "3", "-c", "1", "--format", form]
    wrong, tried = Killed(processes, tmp_path, words, held).faults()
    assert wrong == []
    assert tried > 20
