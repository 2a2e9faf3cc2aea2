"""``gymdata merge`` and ``collect --shard``: parts that were collected side by side are one run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.cli.main import main
from gymdata.collect.run import collect
from gymdata.collect.task_files import Shard
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.store import read_run_json, read_table
from gymdata.store.lock import Lock
from tests.collect.conftest import ADDER
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts
from tests.rollout_files import rollout, two_turns, write_run

TIMES = ("started_at", "duration_s")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows without times, by task and index."""
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["task_id"], row["rollout_index"]))


@pytest.fixture
def shard(tmp_path: Path) -> Callable[..., Path]:
    """Collects a shard of eleven tasks, twice each, with an engine whose answers follow from seed and prompt."""
    tasks = [{"task_id": f"t{k}", "prompt": f"q{k}"} for k in range(11)]
    env = tmp_path / "adder.py"
    env.write_text(ADDER)

    def collected(part: str | None, name: str = "", **more: Any) -> Path:
        out = tmp_path / (name or f"s{(part or 'all').replace('/', '-')}")
        made = {"run_id": "array-7", "seed": 5, **more}
        sampler = parts(FakeSampler(add_or_answer), env=f"{env}:Adder")
        collect(tasks, output=out, num_rollouts=2, shard=part, parts=sampler, **made)
        return out

    return collected


def twice(tmp_path: Path, name: str, first: int, **facts: Any) -> Path:
    """A run of two rollouts of task ``name``."""
    run = write_run(tmp_path / name, [rollout(name, k, 1.0, two_turns(4, first + k)) for k in range(2)])
    known = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**known, "stage": "collect", **facts}))
    return run


def test_the_shards_together_are_the_run(shard: Callable[..., Path], tmp_path: Path) -> None:
    """Merged, three shards hold the rows of the run without shards, ids, seeds and tokens included; lineage leads to all."""
    report = gymdata.merge([shard(f"{k}/3") for k in (1, 2, 3)], tmp_path / "merged")
    assert rows_of(tmp_path / "merged") == rows_of(shard(None))
    assert (report.rollouts, report.duplicates, report.shards_missing) == (22, 0, [])
    facts = read_run_json(tmp_path / "merged")
    assert [Path(p["path"]).name for p in facts["parents"]] == ["s1-3", "s2-3", "s3-3"]
    assert (facts["stage"], facts["run_id"], facts["identity"]["seed"]) == ("merge", "array-7", 5)
    assert gymdata.validate(tmp_path / "merged").exit_code == 0


def test_a_pattern_names_its_runs(shard: Callable[..., Path], tmp_path: Path) -> None:
    """A glob that the shell did not expand is every run that it matches, in order; one that matches none is an error."""
    for k in (1, 2, 3):
        shard(f"{k}/3")
    report = gymdata.merge(tmp_path / "s*-3", tmp_path / "merged")
    assert [Path(run["path"]).name for run in report.runs] == ["s1-3", "s2-3", "s3-3"]
    with pytest.raises(DataError, match="a glob that matches something"):
        gymdata.merge(tmp_path / "x*", tmp_path / "none")


def test_a_shard_that_is_missing_is_named(shard: Callable[..., Path], tmp_path: Path) -> None:
    """A job of the array that did not run shows; with the whole run beside it nothing is missing."""
    parts_there = [shard("1/3"), shard("3/3")]
    assert gymdata.merge(parts_there, write=False).shards_missing == ["2/3 of run array-7"]
    assert gymdata.merge([*parts_there, shard(None)], write=False).shards_missing == []


def test_each_attempt_records_its_shard(shard: Callable[..., Path]) -> None:
    """run.json's extent says which part of the tasks was asked for."""
    facts = read_run_json(shard("2/3"))
    assert facts["extent"]["shard"] == facts["attempts"][0]["extent"]["shard"] == "2/3"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=8), unique=True, max_size=40), st.integers(1, 9))
def test_every_task_is_in_one_shard(names: list[str], count: int) -> None:
    """Whatever the names and the number of parts."""
    found = [name for k in range(1, count + 1) for name in names if name in Shard(k, count)]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "1/2/3"])
def test_a_shard_that_is_no_part_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is named, and what it takes."""
    assert main(["collect", "x.jsonl", "--shard", text, "--run-id", "a", "--seed", "1"]) == 2
    assert f"--shard: got '{text}', expected I/N" in capsys.readouterr().err


def test_a_shard_needs_what_makes_it_a_part_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the run's id and seed its rollouts would be those of another run."""
    assert main(["collect", "x.jsonl", "--shard", "1/2", "--seed", "1"]) == 2
    assert "--shard needs --run-id and --seed" in capsys.readouterr().err


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    """Copies of a rollout are dropped and counted, whatever their times."""
    run = twice(tmp_path, "a", 20)
    shutil.copytree(run, tmp_path / "b")
    report = gymdata.merge([run, tmp_path / "b"], tmp_path / "merged.parquet")
    assert (report.rollouts, report.duplicates) == (2, 2)
    assert rows_of(tmp_path / "merged.parquet") == rows_of(run)


def test_the_same_path_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is given twice under one path is one run, with a warning that names it: alone it is nothing to merge."""
    run, other, merged = twice(tmp_path, "a", 20), twice(tmp_path, "b", 30), tmp_path / "merged.parquet"
    assert main(["merge", str(run), f"{run}/", "-o", str(merged)]) == 2
    assert f"got one run, {run}, expected two or more" in capsys.readouterr().err
    assert main(["merge", str(run), str(other), f"{run}/", "-o", str(merged)]) == 0
    assert f"warning: {run}: given twice; its rollouts are kept once" in capsys.readouterr().err
    facts = read_run_json(Path(f"{merged}.run.json"))
    assert [Path(parent["path"]) for parent in facts["parents"]] == [run, other]
    assert facts["counts"] == {"runs": 2, "rollouts": 4, "duplicates": 0, "shards_missing": []}
    assert [row["task_id"] for row in rows_of(merged)] == ["a", "a", "b", "b"]


def test_contradicting_duplicates_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rollout, both runs and the columns are named; nothing is written."""
    run, other = twice(tmp_path, "a", 20), tmp_path / "b"
    write_run(other, [rollout("a", 1, 0.0, two_turns(4, 21))])
    with pytest.raises(RefusedError, match=r"D701: 1 rollout.*a-1 in .*a and .*b: reward, rewards"):
        gymdata.merge([run, other], tmp_path / "merged")
    assert main(["merge", str(run), str(other), "-o", str(tmp_path / "merged")]) == 1
    assert not (tmp_path / "merged").exists()


def test_runs_of_other_settings_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with the setting and both values; a seed may differ between runs, not within one."""
    same = {"top_p": 1.0, "seed": 1}
    run = twice(tmp_path, "a", 20, identity=same, run_id="a")
    other = twice(tmp_path, "b", 30, identity={"top_p": 0.9, "seed": 2}, run_id="b")
    assert main(["merge", str(run), str(other), "-o", str(tmp_path / "merged")]) == 2
    said = capsys.readouterr().err
    assert "top_p: 1.0 in" in said
    assert "0.9 in" in said
    assert "seed" not in said
    reseeded = twice(tmp_path, "c", 40, identity={**same, "seed": 2}, run_id="c")
    assert gymdata.merge([run, reseeded], write=False).rollouts == 4
    part = twice(tmp_path, "d", 50, identity={**same, "seed": 2}, run_id="a")
    with pytest.raises(UsageError, match=r"seed: 1 in .*a, 2 in .*d"):
        gymdata.merge([run, part], write=False)


def test_a_run_that_is_being_written_is_refused(tmp_path: Path) -> None:
    """Its rows are not all there yet."""
    runs = [twice(tmp_path, "a", 20), twice(tmp_path, "b", 30)]
    lock = Lock(runs[1])
    with pytest.raises(StoreError, match="another process writes to this run"):
        gymdata.merge(runs, tmp_path / "merged")
    lock.release()


def test_other_runs_do_not_replace_what_was_merged(tmp_path: Path) -> None:
    """The same runs again are the same output; others need --overwrite. One run alone is nothing to merge."""
    a, b, c = (twice(tmp_path, name, n) for name, n in (("a", 20), ("b", 30), ("c", 40)))
    for _ in range(2):
        gymdata.merge([a, b], tmp_path / "merged")
    with pytest.raises(StoreError, match="merged rollouts with other settings"):
        gymdata.merge([a, c], tmp_path / "merged")
    assert gymdata.merge([a, c], tmp_path / "merged", overwrite=True).rollouts == 4
    with pytest.raises(UsageError, match="expected two or more"):
        gymdata.merge([a], tmp_path / "merged")


def test_what_stays_with_the_runs_is_said(tmp_path: Path) -> None:
    """Tables made from the rollouts, and failed attempts, are not merged."""
    a, b = twice(tmp_path, "a", 20), twice(tmp_path, "b", 30)
    gymdata.score(a, reward="regex:4")
    report = gymdata.merge([a, b], tmp_path / "merged")
    assert [Path(name).name for name in report.not_merged] == ["scores-regex"]


def test_runs_of_other_kinds_are_named_with_few_of_their_settings(tmp_path: Path) -> None:
    """A collected run and an import differ in all of their settings, which would fill the screen."""
    one = twice(tmp_path, "a", 20, identity={f"setting_{n}": n for n in range(9)})
    other = twice(tmp_path, "b", 60, stage="import", identity={"format": "nemo-gym"})
    with pytest.raises(UsageError, match=r"of different kinds \(collect, import\): format: .*; … and 6 more settings"):
        gymdata.merge([one, other], write=False)


def test_imports_of_different_files_are_merged(tmp_path: Path) -> None:
    """Which files were read is no setting: two imports that were made alike become one file of rollouts."""
    lines = (Path(__file__).parents[2] / "sample_data/rollouts/nemo_gym.jsonl").read_text().splitlines(keepends=True)
    for name, some in (("a", lines[:10]), ("b", lines[10:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
        gymdata.import_rollouts([tmp_path / f"{name}.jsonl"], output=tmp_path / name)
    gymdata.merge([tmp_path / "a", tmp_path / "b"], output=tmp_path / "both")
    assert gymdata.load_rollouts(tmp_path / "both").num_rows == len(lines)


def test_shards_of_other_task_files_are_refused(tmp_path: Path) -> None:
    """One run was collected from one set of tasks: the error names both shards and both hashes."""
    shards = [
        twice(
            tmp_path,
            name,
            first,
            attempts=[{"extent": {"shard": part}}],
            tasks={"files": [{"path": "tasks.jsonl", "xxh3": xxh3}]},
        )
        for name, first, part, xxh3 in (("a", 20, "1/2", "aa11"), ("b", 40, "2/2", "bb22"))
    ]
    for run in shards:
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**facts, "run_id": "one"}))
    with pytest.raises(UsageError, match=r"a and .*b are shards of one run, .*: xxh3 aa11 and bb22"):
        gymdata.merge(shards, write=False)
