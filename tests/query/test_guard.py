"""The process of a statement: a bound on time and on memory, and nothing of it is left or lost on the way here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from gymdata.errors import GymdataError, UsageError
from gymdata.query.child import run_query
from gymdata.query.guard import Limits
from gymdata.store.reading import DataWarning

RUN = Path(__file__).parents[2] / "sample_data" / "rollouts" / "clean.jsonl"


def result(sql: str, *paths: Path) -> pa.Table:
    with run_query(sql, *paths) as reader:
        return reader.read_all()


@pytest.mark.parametrize("sql", ["select count(*) from range(100000000000) a, range(1000) b",
                                 "select a.range + b.range from range(100000000000) a, range(1000) b"])  # fmt: skip
def test_a_statement_over_its_time_is_interrupted(sql: str):
    """A statement that would run for hours ends with an error, before its first row or between two."""
    with pytest.raises(UsageError, match=r"took longer than 0\.2 s"), run_query(sql, RUN, limits=Limits(0.2)) as reader:
        for _ in reader:
            pass


@pytest.mark.parametrize(
    "sql", ["select list(range) from range(200000000)", "select list_sum(range(50000000::bigint))"]
)
def test_a_statement_over_its_memory_is_an_error(sql: str):
    """Buffers, which DuckDB counts, and a list value of 400 MB, which it does not, end the statement with an error that
    names the limit, and no process more than its own."""
    with (
        pytest.raises(GymdataError, match=r"out of memory.* limit of 0\.537 GB") as raised,
        run_query(sql, RUN, limits=Limits(memory=512 << 20, threads=1)) as reader,
    ):
        reader.read_all()
    assert raised.value.exit_code == 1


def test_a_statement_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither one that ends nor one that is ended: the folder is this process's, not the child's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with run_query("select 1", RUN) as reader:
        assert reader.read_all().num_rows == 1
    endless = "select count(*) from range(100000000000) a, range(1000) b"
    with pytest.raises(UsageError), run_query(endless, RUN, limits=Limits(0.2)) as reader:
        reader.read_all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kilobytes", [300_000, 1_300_000])
def test_too_little_memory_for_the_process_is_named(kilobytes: int):
    """Under a low ``ulimit -v`` a query ends with an error about memory, not with a signal, and does not call the file
    damaged."""
    words = [sys.executable, "-m", "gymdata", "query", "select count(*) from rollouts", str(RUN)]
    line = f"ulimit -v {kilobytes}; exec {shlex.join(words)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"out of memory.*SQL takes at least", done.stderr)
    assert "cut off" not in done.stderr


def test_what_is_reported_of_the_data_is_reported_here(tmp_path: Path):
    """Warnings about the files are raised where the query was called, and errors keep their type, text and hint."""
    copies = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for copy in copies:
        copy.write_bytes(RUN.read_bytes())
    with pytest.warns(DataWarning, match="same bytes"):
        assert result("select count(*) as n from rollouts", *copies).to_pylist() == [{"n": 48}]
    with pytest.raises(UsageError, match="rewrd") as raised:
        result("select rewrd from rollouts", RUN)
    assert "did you mean 'reward'?" in str(raised.value.hint)


def test_types_cross_the_processes():
    """Nested, dictionary and empty results arrive as DuckDB made them."""
    sql = "select 'a'::enum('a', 'b') as e, {'x': [1, null]} as s, 1::hugeint as h where "
    assert result(sql + "true", RUN).to_pylist() == [{"e": "a", "s": {"x": [1, None]}, "h": 1}]
    assert result(sql + "false", RUN).column_names == ["e", "s", "h"]
