"""A real ``gymdata finetune`` is killed between its stages and within a training, and started again."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.finetune.parts import ROOT, by_rule, counting
from tests.forks import Fork, Forks, forks, run
from tests.kills import kill_when

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.timeout(1200)]

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


def held(out: Path) -> dict[str, Any]:
    """Names of all files but logs; rows without times, selections, weights, and the figures of each epoch."""
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


TRL = {"_type": "trl", "dpo": {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2}}
VALIDATION = {"dataset": str(ROOT / "sample_data" / "tasks" / "heldout.jsonl"), "interval": 1, "limit": 2}


@pytest.mark.parametrize(
    ("adapter", "loop", "moments"),
    [
        pytest.param(
            counting(), {"algorithm": "anything"}, ["state.json", "*/*/rollouts/part-*", "*/selection.json"], id="its stages"
        ),
        pytest.param(
            TRL, {"algorithm": "dpo", "validation": VALIDATION}, ["**/checkpoint-1/gymdata_proof.json", "**/SUCCESS"],
            id="its training",
        ),
    ],
)  # fmt: skip
def test_a_loop_that_was_killed_finishes(
    adapter: dict[str, Any], loop: dict[str, Any], moments: list[str], processes: Forks, tmp_path: Path
) -> None:
    """Killed once each of some files is there, it ends with the same as a loop that nobody killed. Every call of a loop that
    is cut short: ``test_loop.py``; every state of a training's files: ``tests/train/test_crash_states.py``."""
    out, said = tmp_path / "out", tmp_path / "said"
    words = ["finetune", str(by_rule(tmp_path, out, adapter, limit=2, num_epochs=1, **loop))]

    def begin() -> Fork:
        return processes.start(run_as_killed, words, said, [16])

    assert begin().wait() == 0, said.read_text()
    expected = held(out)
    shutil.rmtree(out)
    killed = 0
    for pattern in moments:
        killed += kill_when(begin().pid, lambda pattern=pattern: any(out.glob(pattern)))
    assert killed == len(moments)
    assert begin().wait() == 0, said.read_text()
    assert held(out) == expected
