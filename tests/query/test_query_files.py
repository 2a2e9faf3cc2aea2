"""Which files a query takes for which table, and what it says of newer files, copies and hostile input."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.cli.main import main
from gymdata.commands.query.run import write_result
from gymdata.commands.query.statement import run_statement
from gymdata.errors import DataError, GymdataError
from gymdata.rollouts.schema import PAIRS, VERSION_KEY
from gymdata.store import read_run_json, write_run_json
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [rollout("t0", i, float(i), two_turns(1, 5 + i)) for i in range(2)])


@pytest.mark.parametrize("of", ["metadata", "run.json"])
@pytest.mark.parametrize("path", ["folder", "file"])
def test_a_newer_table_is_refused(run: Path, of: str, path: str) -> None:
    """A file whose metadata, or whose run.json, names a newer version of its table is not read."""
    part = run / "rollouts" / "part-00000.parquet"
    if of == "metadata":
        table = pq.read_table(part)
        newer = {**table.schema.metadata, VERSION_KEY: b"99"}
        pq.write_table(table.replace_schema_metadata(newer), part)
    else:
        write_run_json(run, read_run_json(run) | {"schemas": {"rollouts": 99}})
    with pytest.raises(DataError, match="rollouts version 99 is newer"):
        gymdata.query("SELECT count(*) FROM rollouts", run if path == "folder" else part)


def test_a_run_and_its_copy_are_counted_twice_with_a_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rollouts that two paths give are said on stderr, whole copies and single ones, with their number."""
    copy = run.parent / "copy"
    shutil.copytree(run, copy)
    sql = "SELECT count(*) AS n FROM rollouts"
    assert main(["query", sql, str(run), str(copy), "--csv"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "n\n4\n"
    assert "2 rollouts are there more than once (first: t0-0)" in shown.err
    other = write_run(run.parent / "other", [rollout(f"t{t}", 0, 1.0, two_turns(1, 5)) for t in range(3)])
    assert main(["query", "SELECT count(*) AS n FROM turns", str(run), str(other), "--csv"]) == 0
    shown = capsys.readouterr()
    assert "1 rollout is there more than once (first: t0-0)" in shown.err


def test_a_file_is_given_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, also with its folder or by a link, is refused the second time, as commands that make data of it do."""
    part, link = run / "rollouts" / "part-00000.parquet", run.parent / "link.parquet"
    link.symlink_to(part)
    twice = [
        (run, run, run),
        (part, part, part),
        (run, part, part),
        (part, link, link),
        (run, f"{run}/rollouts/*", part),
    ]
    for first, second, named in twice:
        assert main(["query", "SELECT count(*) AS n FROM rollouts", str(first), str(second)]) == 2
        assert f"{named} is given twice\n" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_one_column_of_a_table_is_no_table(run: Path, tmp_path: Path, suffix: str) -> None:
    """A file with a column `value`, `turns` or `severity` is not taken for scores, rollouts or violations."""
    for name in ("value", "turns", "severity", "ref_logprobs", "chosen_ids"):
        file = tmp_path / f"foreign.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.table({name: [1.0], "x": ["y"]}), file)
        else:
            file.write_text(json.dumps({name: 1.0, "x": "y"}) + "\n")
        with pytest.raises(DataError, match="of no known format, expected one of gymdata's tables"):
            gymdata.query("SELECT 1", file)


def test_a_table_is_recognised_by_its_name_or_most_of_its_columns(run: Path, tmp_path: Path) -> None:
    """Without metadata the columns name the table; one that is missing is named."""
    gymdata.pairs(run, output=tmp_path / "pairs")
    table = pq.read_table(tmp_path / "pairs" / "pairs.parquet")
    bare = tmp_path / "bare.parquet"
    pq.write_table(table.replace_schema_metadata(), bare)
    assert gymdata.query("SELECT count(*) AS n FROM pairs", bare)["n"].to_pylist() == [1]
    pq.write_table(table.drop_columns(["margin"]).replace_schema_metadata(), bare)
    with pytest.raises(DataError, match="margin"):
        gymdata.query("SELECT count(*) AS n FROM pairs", bare)
    unknown = {**PAIRS.metadata, b"gymdata.schema": b"novel"}
    pq.write_table(table.replace_schema_metadata(unknown), bare)
    with pytest.raises(DataError, match="'novel', which is no table"):
        gymdata.query("SELECT count(*) AS n FROM pairs", bare)


def test_a_column_that_was_added_to_a_file_is_null_in_others(run: Path, tmp_path: Path) -> None:
    """Files of one table may have columns of their own; one that the table needs is named where it is missing."""
    table = pq.read_table(run / "rollouts" / "part-00000.parquet")
    noted, less = tmp_path / "noted.parquet", tmp_path / "less.parquet"
    pq.write_table(table.append_column("note", pa.array(["a", "b"])), noted, write_page_checksum=True)
    other = write_run(tmp_path / "other", [rollout("t1", 0, 1.0, two_turns(1, 9))])
    rows = gymdata.query("SELECT note, reward FROM rollouts WHERE reward >= 0 ORDER BY task_id, reward", noted, other)
    assert rows.to_pylist() == [{"note": n, "reward": r} for n, r in (("a", 0.0), ("b", 1.0), (None, 1.0))]
    pq.write_table(table.drop_columns(["reward"]), less)
    with pytest.raises(DataError, match=r"less\.parquet: table rollouts lacks the column reward"):
        gymdata.query("SELECT count(*) FROM rollouts", less)


@pytest.mark.parametrize(
    ("command", "content"),
    [(["query", "SELECT 1"], ""), (["query", "SELECT 1"], "\ufeff\n"), (["pairs"], " \n\t\n\n")],
)
def test_a_blank_file_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], content: str
) -> None:
    """Nothing but white space is an error, never "no errors" or no rows."""
    blank = tmp_path / "blank.jsonl"
    blank.write_text(content)
    out = [] if command[0] == "query" else ["-o", str(tmp_path / "out")]
    assert main([*command, str(blank), *out]) == 2
    assert f"error: {blank}: is empty" in capsys.readouterr().err


#: Statements that once ended as "unexpected …: this is a defect", or are near to those.
STATEMENTS = [
    "SELECT * FROM test_all_types()", "UPDATE EXTENSIONS", "SELECT [INTERVAL 1 DAY], MAP {'a': blob 'x'}, {'b': '1'::BIT}",
    "SELECT 1;;", "SELECT 1 --", "SELECT 1 /*", "EXPLAIN", "EXPLAIN EXPLAIN SELECT 1", "PIVOT rollouts ON", "VALUES (1)",
    "SELECT '\x00'", "SELECT \ud800", "SELECT chr(0)", "SELECT " + "(" * 2000 + "1" + ")" * 2000, "SELECT error('x')",
    "SELECT 1/0, 'nan'::DOUBLE, 'infinity'::TIMESTAMP, '290309-12-22 (BC)'::DATE", "SELECT range(100000000000)",
    "SELECT * FROM gymdata_rollouts_0", "SELECT gymdata_prompts([], 'x')", "CALL pragma_version()", "CHECKPOINT", "BEGIN",
    "SHOW ALL TABLES", "PREPARE a AS SELECT 1", "EXECUTE a", "SELECT ?", "SELECT 10::HUGEINT * 10 ** 30, 1e400",
    "SELECT unnest(turns) FROM rollouts LIMIT 1", "SELECT count(*) AS a, count(*) AS a FROM rollouts",
    "SELECT 1::VARIANT, (1, 'x')",
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_no_statement_is_a_defect(run: Path, suffix: str) -> None:
    """Whatever is typed: a result that can be written, or an error that says what is wrong."""
    for sql in STATEMENTS:
        with (
            contextlib.suppress(GymdataError, MemoryError),
            run_statement(sql, [str(run)], as_json=suffix != "parquet") as reader,
        ):
            write_result(reader, run.parent / f"out.{suffix}", overwrite=True)


_WORDS = st.sampled_from(
    ["SELECT", "FROM", "WHERE", "rollouts", "turns", "messages", "failures", "reward", "unnest(turns)", "count(*)", "*", ",",
     "(", ")", "[", "]", "{", "}", "'", '"', ";", "--", "/*", "*/", "1", "NULL", "INTERVAL", "BLOB", "'x'", "=", "<", "AS",
     "::BIT", "ORDER", "BY", "LIMIT", "UNION", "ALL", "EXPLAIN", "UPDATE", "CALL", "?", "$1", "\\", "é", "\x00"]
)  # fmt: skip


@pytest.mark.full
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(_WORDS, max_size=12))
def test_random_words_are_answered(run: Path, words: list[str]) -> None:
    """Any mixture of SQL's words gives a result or an error of ours."""
    with contextlib.suppress(GymdataError):
        gymdata.query(" ".join(words), run)


#: A value in the place of another: run.json files that once ended a command as a defect, or are near to those.
ODD: list[Any] = ["text", "", 5, -1.5, True, None, [], [1], {}, {"a": 1}]
ODD += [2**64, 2**200, -(2**70), "\ud800", "\x00", [[]]]
FACTS: dict[str, Any] = {
    "run_id": "run-1", "gymdata": "0.1.0", "schemas": {"rollouts": 1}, "created_at": "2026-01-01", "stage": "collect",
    "identity": {"model": "m", "temperature": 1.0, "engine": {"dtype": "float32"}}, "extent": {"num_rollouts": 2},
    "config": {"rewards": ["numeric"], "path": "x"}, "counts": {"rollouts": 2}, "engine": {"vocab_size": 100}, "chat": {},
    "attempts": [{"pid": 1, "operation": {}}], "parents": [{"path": "nowhere", "run_id": "r"}], "notes": [],
    "files": [{"path": "rollouts/part-00000.parquet", "rows": 2, "bytes": 1, "xxh3": "0"}],
}  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a run.json has values: the whole, each key, each item."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(copy[at[0]], at[1:], new)
    return copy


@pytest.mark.full
@pytest.mark.matrix("validate", "pairs")
@pytest.mark.parametrize(
    "command",
    [["query", "SELECT count(*) FROM rollouts", "RUN"], ["validate", "RUN"], ["pairs", "RUN"], ["experience", "RUN"],
     ["filter", "RUN", "--where", "reward >= 0", "-o", "OUT"],
     ["export", "RUN", "-o", "OUT.jsonl", "--format", "trl-messages"]],
    ids=lambda c: c[0],
)  # fmt: skip
def test_no_run_json_is_a_defect(run: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """Every place of a run.json with every kind of odd value in it: the command works, or says what is wrong where."""
    cases = [(at, odd) for at in places(FACTS) for odd in ODD]
    for number, (at, odd) in enumerate(cases):
        if number % 5 != len(command[0]) % 5:
            continue  # each command takes its share of the cases
        (run / "run.json").write_text(json.dumps(replaced(FACTS, at, odd)))
        told = [w.replace("RUN", str(run)).replace("OUT", str(run.parent / "out")) for w in command]
        code = main([*told, *([] if command[0] in ("query", "validate", "pairs") else ["--overwrite"])])
        shown = capsys.readouterr()
        assert "this is a defect" not in shown.err, (at, odd, shown.err)
        assert code in (0, 1, 2), (at, odd, shown.err)


@pytest.mark.full
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=40), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FACTS, "path"]), inner, max_size=3),
).map(json.dumps)))  # fmt: skip
def test_any_text_as_run_json_is_answered(run: Path, text: str) -> None:
    """Reading facts and rows gives a result or an error of ours."""
    (run / "run.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    for read in (lambda: read_run_json(run), lambda: gymdata.query("SELECT count(*) FROM rollouts", run)):
        with contextlib.suppress(GymdataError):
            read()
