"""``gymdata finetune`` killed in each state that the files of the loop and of its commands pass through."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.finetune.parts import ROOT, by_rule, counting
from tests.forks import Forks, forks
from tests.kills import Killed, line_of, run

pytestmark = [pytest.mark.torch, pytest.mark.spread]

#: Columns of rollouts that tell when they were made.
_TIMES = {"started_at", "duration_s"}
_LOADED = [
    "gymdata.cli.main", "gymdata.commands.finetune.run", "gymdata.commands.finetune.epochs",
    "gymdata.commands.finetune.jobs", "polars", "pyarrow.dataset", "gymdata.commands.report.run",
    "gymdata.commands.pairs.run", "gymdata.commands.validate.run", "gymdata.commands.import_export.run",
    "gymdata.commands.collect.run", "aiohttp", "torch", "gymdata.commands.train.run", "gymdata.commands.train.process",
    "gymdata.commands.train.trainers.run", "gymdata.commands.train.trainers.dpo",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto",
]  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with forks(*_LOADED) as made:
            yield made


def held(work: Path) -> dict[str, Any]:
    """Names of all files but logs; rows without times, selections, weights, and the figures of each epoch."""
    out = work / "out"
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        # Half a line that a kill left is kept aside, as .torn.
        if "logs" in path.relative_to(out).parts or path.suffix == ".torn":
            continue
        found[name] = "there"
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            rows = table.select([c for c in table.column_names if c not in _TIMES]).to_pylist()
            found[name] = sorted(rows, key=repr)
        elif path.name in ("selection.json", "model.safetensors", "lines"):
            found[name] = path.read_bytes()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found["figures"] = [{k: v for k, v in row.items() if k not in ("data_xxh3", "seconds")} for row in rows]
    state = json.loads((out / "state.json").read_text())
    found["stages"] = {e: {s: entry["state"] for s, entry in stages.items()} for e, stages in state["epochs"].items()}
    found["status"] = state["status"]
    return found


def run_as_killed(*given: Any) -> int:
    """``run`` of a loop that draws this run ID, so that the files of two can be compared."""
    secrets.token_hex = lambda _=None: "killed"
    return run(*given)


def words(folder: Path, adapter: dict[str, Any], algorithm: str, **loop: Any) -> list[str]:
    """A command over two tasks, four rollouts each."""
    loop |= {"algorithm": algorithm, "limit": 2, "num_epochs": 1}
    return ["finetune", str(by_rule(folder, folder / "work" / "out", adapter, **loop))]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_loop_that_was_killed_finishes(processes: Forks, tmp_path: Path) -> None:
    """It ends with the same: killed before it replaces any of its files, and once before each other line that changes one,
    of the loop and of its commands, whose every state is killed by their own tests."""
    loop = Killed(processes, tmp_path, words(tmp_path, counting(), "anything"), held, [12], how=run_as_killed)
    begun = set[str]()

    def wanted(what: str) -> bool:
        replaces = what.startswith("command ") and what.endswith(".tmp of 0 bytes")
        new = replaces or line_of(what) not in begun
        begun.add(line_of(what))
        return new

    wrong, tried = loop.faults(wanted)
    assert wrong == []
    assert tried > 50


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_loop_that_was_killed_while_it_trains_finishes(processes: Forks, tmp_path: Path) -> None:
    """The same with TRL as the trainer and validation, once before each line of the training and its trainer that changes a
    file: every state of a training is killed by the tests of train-dpo."""
    adapter = {"_type": "trl", "dpo": {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2}}
    validation = {"dataset": str(ROOT / "sample_data" / "tasks" / "heldout.jsonl"), "interval": 1, "limit": 2}
    loop = Killed(
        processes, tmp_path, words(tmp_path, adapter, "dpo", validation=validation), held, [16], how=run_as_killed
    )
    begun = set[str]()

    def wanted(what: str) -> bool:
        new = line_of(what) not in begun and (" train-dpo" in what or "trainers.run" in what)
        begun.add(line_of(what))
        return new

    wrong, tried = loop.faults(wanted)
    assert wrong == []
    assert tried > 20
