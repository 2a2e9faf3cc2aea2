"""Parts of a task file that were collected side by side are one run when ``filter`` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymdata
from gymdata.commands.collect.run import collect
from gymdata.store import read_run_json, read_table
from tests.collect.conftest import ADDER
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts

TIMES = ("started_at", "duration_s")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows without times, by task and index."""
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["task_id"], row["rollout_index"]))


def test_the_parts_together_are_the_run(tmp_path: Path) -> None:
    """With the run's ID and seed, three parts hold the rows of the whole, ids, seeds and tokens included; lineage leads to
    all three."""
    tasks = [{"task_id": f"t{k}", "prompt": f"q{k}"} for k in range(11)]
    env = tmp_path / "adder.py"
    env.write_text(ADDER)

    def collected(name: str, part: Sequence[dict[str, str]]) -> Path:
        sampler = parts(FakeSampler(add_or_answer), env=f"{env}:Adder")
        collect(part, output=tmp_path / name, num_rollouts=2, parts=sampler, run_id="array-7", seed=5)
        return tmp_path / name

    names = ("s0", "s1", "s2")
    report = gymdata.filter([collected(name, tasks[k::3]) for k, name in enumerate(names)], tmp_path / "one")
    assert rows_of(tmp_path / "one") == rows_of(collected("all", tasks))
    assert report.rollouts_out == 22
    facts = read_run_json(tmp_path / "one")
    assert tuple(Path(p["path"]).name for p in facts["parents"]) == names
    assert {p["run_id"] for p in facts["parents"]} == {"array-7"}
    assert facts["identity"]["seed"] == 5
    assert gymdata.validate(tmp_path / "one").exit_code == 0
