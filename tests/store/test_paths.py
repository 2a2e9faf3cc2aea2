"""What a path argument means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from gymdata.errors import DataError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, SCORES
from gymdata.store import find_run_json, read_run_json, read_table, resolve, scan_batches, write_run_json
from tests.rollout_files import write_table


def score(name: str, rollout: str) -> pa.Table:
    row = {"rollout_id": rollout, "name": name, "value": 1.0, "status": "scored", "source": "f", "run_id": "r"}
    return pa.Table.from_pylist([row | {"detail": None}], schema=SCORES.schema)


@pytest.fixture
def run(tmp_path: Path, open_run, interrupted, row) -> Path:
    """Two sealed rows, one journaled; two stage folders with scores."""
    interrupted(map(row, range(3)), rows_per_file=2, folder=tmp_path / "run")
    with open_run(rows_per_file=2) as again:
        again.append(row(3))
    interrupted([row(4)], rows_per_file=2)
    for name in ("b", "a"):
        write_table(score(name, "x"), tmp_path / "run" / f"scores-{name}" / "scores.parquet", SCORES)
        write_run_json(tmp_path / "run" / f"scores-{name}", {"stage": "score", "name": name})
    return tmp_path / "run"


def ids(path: Path | str) -> list[int]:
    return [int(i, 16) for i in read_table(path, columns=["rollout_id"])["rollout_id"].to_pylist()]


def test_a_run_folder_is_its_sealed_and_journaled_rows(run: Path):
    """The run, its rollouts folder and a glob over its files are the same rows in the same order."""
    assert [s.path.name for s in resolve(run)] == ["part-00000.parquet", "part-00001.parquet", "part-00002.jsonl"]
    assert ids(run) == ids(run / "rollouts") == ids(f"{run}/rollouts/*0*") == [0, 1, 2, 3, 4]
    assert ids(run / "rollouts" / "part-00001.parquet") == [2, 3]
    assert ids(run / "rollouts" / "part-00002.jsonl") == [4]
    assert pa.Table.from_batches(scan_batches(run)).equals(read_table(run).combine_chunks())


@pytest.mark.parametrize("gone", ["rollouts/part-00000.parquet", "rollouts"])
def test_rows_that_run_json_promises_are_missed(run: Path, tmp_path: Path, gone: str):
    """A sealed part that is gone, alone or with its folder, is an error that names it, and never a run with fewer rows."""
    (run / gone).rename(tmp_path / "elsewhere")
    with pytest.raises(
        DataError, match=r"run/rollouts/part-00000\.parquet: is not there, but run\.json names it with 2"
    ):
        resolve(run)


def test_other_tables_come_from_the_stage_folders(run: Path):
    """A run gives the scores of all its stages by name; a stage folder gives its own."""
    assert read_table(run, SCORES)["name"].to_pylist() == ["a", "b"]
    assert read_table(run / "scores-b", SCORES)["name"].to_pylist() == ["b"]
    assert resolve(run, PAIRS) == []
    assert read_table(run, PAIRS).num_rows == 0
    assert resolve(run / "scores-b", ROLLOUTS) == []


def test_the_run_json_of_anything_is_found(run: Path, tmp_path: Path):
    """Folders, files inside them, and globs; a single file elsewhere has none."""
    part = run / "rollouts" / "part-00000.parquet"
    for path in (run, run / "rollouts", part, f"{run}/rollouts/part*", run / "run.json"):
        assert read_run_json(path)["identity"]["model"] == "tiny", path
    assert read_run_json(run / "scores-a" / "scores.parquet")["name"] == "a"
    file = write_table(score("c", "x"), tmp_path / "out" / "c.parquet", SCORES)
    assert find_run_json(file) is None
    with pytest.raises(DataError, match="no such file"):
        read_run_json(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"has no run\.json"):
        read_run_json(tmp_path / "out")


def test_a_path_that_leads_nowhere_says_so(run: Path, tmp_path: Path):
    """Missing files name their neighbour; folders that are no runs say what they hold; globs that match nothing too."""
    with pytest.raises(DataError, match=r"did you mean 'part-0000.\.parquet'"):
        resolve(run / "rollouts" / "part-0000.parquet")
    # A typo further up is named, too.
    with pytest.raises(DataError, match="did you mean 'rollouts'"):
        resolve(run / "rollout" / "part-00000.parquet")
    with pytest.raises(DataError, match=r"not a run: it has no run\.json"):
        resolve(tmp_path)
    with pytest.raises(DataError, match="a glob that matches something"):
        resolve(f"{tmp_path}/*.parquet")
    (tmp_path / "x.bin").write_bytes(b"\x00\x01\x02\x03")
    with pytest.raises(DataError, match="neither Parquet nor JSON lines"):
        resolve(tmp_path / "x.bin")


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl", "pipe.parquet"])
def test_a_pipe_is_refused_unread(tmp_path: Path, name: str):
    """Files are read more than once, and of a pipe the second reading would have nothing."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is no regular file, and files are read more than once"):
        resolve(tmp_path / name)


def test_content_decides_where_the_name_says_nothing(run: Path, tmp_path: Path):
    """A Parquet file without suffix is Parquet; a name with brackets is not taken for a glob."""
    odd = tmp_path / "odd[1]"
    odd.write_bytes((run / "rollouts" / "part-00000.parquet").read_bytes())
    assert resolve(odd)[0].kind == "parquet"
    assert ids(odd) == [0, 1]


def test_finding_and_reading_json_lines_needs_no_pyarrow(run: Path, tmp_path: Path):
    """The JSON lines validator starts without pyarrow and polars."""
    code = """
import sys
from gymdata.store import resolve
from gymdata.store.lines import iter_lines
print(sum(1 for s in resolve(sys.argv[1]) for _ in iter_lines(s)))
assert not {"pyarrow", "polars"} & sys.modules.keys()
"""
    file = write_table(read_table(run), tmp_path / "x.jsonl", ROLLOUTS)
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_a_sealed_part_that_is_gone_is_never_read_over(tmp_path: Path):
    """A part that run.json names and the folder lacks stops every reader, naming the file and its rows."""
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "run.json").write_text('{"files": [{"path": "rollouts/part-00000.parquet", "rows": 7, "bytes": 1}]}')
    with pytest.raises(DataError, match=r"part-00000.parquet: is not there.*7 rows"):
        resolve(run, ROLLOUTS)
