"""The guard of SQL: one reading statement, no file outside, a bound on time and on memory."""

from pathlib import Path

import pytest

from gymdata.errors import UsageError
from gymdata.query.guard import Limits
from gymdata.query.run import run_query

RUN = Path(__file__).parents[2] / "sample_data" / "rollouts" / "clean.jsonl"


@pytest.mark.parametrize(
    "sql",
    ["select * from rollouts; select 1", "copy (select 1) to '/tmp/gymdata-x.csv'", "attach '/tmp/gymdata-x.db'",
     "set threads=1", "pragma database_list", "call pragma_version()", "create table t as select 1",
     "explain analyze copy (select 1) to '/tmp/gymdata-x.csv'"],
)  # fmt: skip
def test_what_is_not_one_select_is_refused(sql: str):
    """Anything but one SELECT is a usage error that says what was given."""
    with pytest.raises(UsageError, match=r"expected (one|a) SELECT"), run_query(sql, RUN):
        pass
    assert not list(Path("/tmp").glob("gymdata-x.*"))


@pytest.mark.parametrize("source", ["read_csv('/etc/passwd')", "read_blob('/etc/passwd')", "glob('/*')"])
def test_a_select_reaches_no_file_outside(source: str):
    """Functions that read files see none but the given ones."""
    with (
        pytest.raises(UsageError, match="disabled by configuration"),
        run_query(f"select * from {source}", RUN) as reader,
    ):
        reader.read_all()


@pytest.mark.parametrize("sql", ["select count(*) from range(100000000000) a, range(1000) b",
                                 "select a.range + b.range from range(100000000000) a, range(1000) b"])  # fmt: skip
def test_a_statement_over_its_time_is_interrupted(sql: str):
    """A statement that would run for hours ends with an error, before its first row or between two."""
    with pytest.raises(UsageError, match=r"took longer than 0\.2 s"), run_query(sql, RUN, limits=Limits(0.2)) as reader:
        for _ in reader:
            pass


def test_a_statement_over_its_memory_is_an_error():
    """A result that does not fit ends with DuckDB's error, not with the process."""
    limits = Limits(memory=64 << 20, threads=1)
    with (
        pytest.raises(UsageError, match="Out of Memory"),
        run_query("select list(range) from range(200000000)", RUN, limits=limits) as reader,
    ):
        reader.read_all()
