"""SQL over real files: the views, what is read, what is refused, and how mistakes are answered."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.schema import AUDIT, TABLES
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import Run, write_run_json
from tests.query.conftest import ODD
from tests.rollout_files import rollout, two_turns, write_run, write_table


@pytest.fixture(params=["parquet", pytest.param("jsonl", marks=pytest.mark.full)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rows = [rollout(f"t{t}", i, r, two_turns(t, 50 + i)) for t in range(3) for i, r in enumerate([0.0, 1.0, None])]
    rows += [
        rollout(f"odd{i}", 0, 0.5, calls, rewards=[{"name": "my style", "value": 2.0}]) for i, calls in enumerate(ODD)
    ]
    return write_run(tmp_path / "run", rows, request.param)


def test_named_rewards_are_columns(run: Path) -> None:
    """reward_NAME exists for every name, also an odd one, and is null where a rollout has no such part."""
    table = gymdata.query('SELECT reward_exact, "reward_my style" AS s FROM rollouts ORDER BY rollout_id', run)
    assert table["reward_exact"].to_pylist() == [None] * 3 + [0.0, 1.0, None] * 3
    assert table["s"].to_pylist() == [2.0] * 3 + [None] * 9


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_stored_nan_is_null(tmp_path: Path, suffix: str) -> None:
    """NaN, which DuckDB sorts above all numbers, is missing in rewards, their parts and log-probabilities alike."""
    nan = float("nan")
    rows = [rollout("t0", k, r, two_turns(0, 50 + k)) for k, r in enumerate([nan, 0.25, None])]
    rows[0]["turns"][0]["generation_log_probs"] = [nan, -1.0, -2.0]
    run = write_run(tmp_path / "run", rows, suffix)
    sql = """SELECT count(reward) AS n, avg(reward) AS mean, count(*) FILTER (reward > 0.4) AS high,
        avg(reward_exact) AS part, count(list_filter(rewards, lambda r: r.value IS NULL)[1].name) AS missing FROM rollouts"""
    (row,) = gymdata.query(sql, run).to_pylist()
    assert row == {"n": 1, "mean": 0.25, "high": 0, "part": 0.25, "missing": 2}
    sql = "SELECT generation_log_probs AS lp, reward FROM turns WHERE turn = 0 AND rollout_id = 't0-0'"
    assert gymdata.query(sql, run).to_pylist() == [{"lp": [None, -1.0, -2.0], "reward": None}]


@pytest.mark.parametrize("sql", ["FROM rollouts", "TABLE rollouts", "SELECT r FROM (FROM rollouts) r"])
def test_a_table_without_a_select_has_all_its_columns(small: Path, sql: str) -> None:
    """Those of named rewards, too, as with a star."""
    assert "reward_exact" in str(gymdata.query(sql, small).schema)


def test_turns_have_the_prompts_that_were_read(run: Path) -> None:
    """prompt_token_ids equals the reference for chains, breaks, branches and retries alike."""
    table = gymdata.query("SELECT rollout_id, turn, prompt_token_ids FROM turns ORDER BY ALL", run)
    got: dict[str, list[list[int]]] = {}
    for row in table.to_pylist():
        got.setdefault(row["rollout_id"], []).append(row["prompt_token_ids"])
    for i, calls in enumerate(ODD):
        assert got[f"odd{i}-0"] == [list(prompt) for prompt, _ in calls]
    assert got["t1-0"] == [[1, 1], [1, 1, 10, 11, 2, 30, 31]]


def test_messages_and_failures_are_views(run: Path) -> None:
    """Messages are numbered from 0; failures exist even when nothing failed, and are read when something did."""
    table = gymdata.query("SELECT position, role, turn FROM messages WHERE rollout_id = 't0-0' ORDER BY position", run)
    assert table.to_pylist()[1] == {"position": 1, "role": "assistant", "turn": 0}
    assert gymdata.query("SELECT * FROM failures", run).num_rows == 0
    failure = {"kind": "engine", "attempt": 2, "counts": True, "turns": [{"parent": -1}], "rollout_id": "t9-0"}
    (run / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    (row,) = gymdata.query("SELECT kind, attempt, turns->>'$[0].parent' AS p FROM failures", run).to_pylist()
    assert row == {"kind": "engine", "attempt": 2, "p": "-1"}


def test_stage_tables_are_views(run: Path) -> None:
    """Pairs are there with the run, with their folder and as a file."""
    gymdata.pairs(run, breaks="drop")
    for path in (run, run / "pairs-reward", run / "pairs-reward" / "pairs.parquet"):
        assert gymdata.query("SELECT count(*) AS n FROM pairs", path)["n"].to_pylist() == [3]
    joined = "SELECT count(*) AS n FROM pairs JOIN rollouts ON chosen_rollout_id = rollout_id WHERE reward = 1"
    assert gymdata.query(joined, run)["n"].to_pylist() == [3]


def test_what_an_audit_wrote_is_a_view(run: Path) -> None:
    """audit.parquet is there with the run, its folder and alone, and without it the error says what writes one."""
    with pytest.raises(UsageError, match="gymdata audit --write-as ref_logprobs"):
        gymdata.query("SELECT * FROM audit", run)
    rows = [{"rollout_id": "t0-0", "ref_logprobs": [-1.0, -2.0], "entropy": [0.5, 0.5]}]
    file = run / "audit-policy" / "audit.parquet"
    write_table(pa.Table.from_pylist(rows, schema=AUDIT.arrow), file, AUDIT)
    write_run_json(file.parent, {"stage": "audit"})
    plain = run.parent / "plain.parquet"
    pq.write_table(pq.read_table(file).replace_schema_metadata(), plain)
    for path in (run, file.parent, file, plain):
        assert gymdata.query("SELECT * FROM audit", path).to_pylist() == rows
    joined = "SELECT list_sum(ref_logprobs) AS s FROM audit JOIN rollouts USING (rollout_id)"
    assert gymdata.query(joined, run).to_pylist() == [{"s": -3.0}]


def test_the_help_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever writes a query sees what it can be about."""
    assert main(["query", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ("turns", "messages", "failures", *TABLES) if name not in shown] == []


def test_files_globs_and_several_runs(tmp_path: Path) -> None:
    """Parquet and JSON lines of several runs stand in one view, whatever kind of path names them."""
    one = write_run(tmp_path / "one", [rollout("a", 0, 0.0, two_turns(1, 50))])
    two = write_run(tmp_path / "two[x]", [rollout("b", 0, 1.0, two_turns(2, 50))], "jsonl")
    sql = "SELECT sum(reward) AS s, count(*) AS n FROM rollouts"
    for paths in ([one, two], [tmp_path / "*"], [tmp_path / "*" / "rollouts" / "part-*"]):
        assert gymdata.query(sql, *paths).to_pylist() == [{"s": 1.0, "n": 2}]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_rows_in_one_list_are_read(name: str, tmp_path: Path) -> None:
    """As by the commands that read rollouts."""
    run = write_run(tmp_path / "run", [rollout("t", n, float(n), [([1], [40 + n, 2])]) for n in range(2)], "jsonl")
    (lines,) = (run / "rollouts").glob("*.jsonl")
    (tmp_path / name).write_text(f"[{','.join(lines.read_text().splitlines())}]")
    table = gymdata.query("SELECT rollout_index, reward FROM rollouts ORDER BY 1", tmp_path / name)
    assert table.to_pylist() == [{"rollout_index": 0, "reward": 0.0}, {"rollout_index": 1, "reward": 1.0}]


def test_rows_that_are_still_journaled_are_there(tmp_path: Path) -> None:
    """While a run is being collected, its sealed and its journaled rows are in one view, each once."""
    rows = [rollout("a", i, float(i), two_turns(1, 50 + i), run_id="run-1") for i in range(3)]
    with Run.open(
        tmp_path / "run", identity={}, extent={}, operation={}, run_id="run-1", rows_per_file=2, fsync_interval_s=60
    ) as run:
        for row in rows:
            run.append(row)
        table = gymdata.query("SELECT sum(reward) AS s, count(*) AS n FROM rollouts", tmp_path / "run")
        assert table.to_pylist() == [{"s": 3.0, "n": 3}]
        pairs = gymdata.pairs(tmp_path / "run", write=False)
        assert pairs.table["chosen_rollout_id"].to_pylist() == ["a-2"]


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        *(
            (sql, "expected a SELECT")
            for sql in (
                "COPY (SELECT 1) TO '{out}'",
                "CREATE TABLE t AS SELECT 1",
                "ATTACH '{out}'",
                "SET enable_external_access = true",
                "PRAGMA database_list",
            )
        ),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'", "disabled by configuration"),
        ("SELECT 1; SELECT 2", "expected one SELECT"),
        ("", "expected one SELECT"),
        ("SELECT * FROM read_text('{secret}')", "disabled by configuration"),
        ("SELECT * FROM glob('/*')", "disabled by configuration"),
        ("SELECT * FROM '{secret}'", "secret"),
        ("SELECT * FROM query('COPY (SELECT 1) TO ''{out}''')", "SQL"),
    ],
)
def test_it_only_reads_and_only_the_given_files(small: Path, sql: str, error: str) -> None:
    """Statements that change anything and files that were not given are refused, and nothing is written."""
    file = small / "rollouts" / "part-00000.parquet"
    before = file.read_bytes()
    secret, out = small.parent / "secret.csv", small.parent / "out"
    secret.write_text("x\n1\n")
    with pytest.raises(UsageError, match=error):
        gymdata.query(sql.format(out=out, file=file, secret=secret), small)
    assert not out.exists()
    assert file.read_bytes() == before


@pytest.mark.parametrize("sql", ["EXPLAIN SELECT * FROM rollouts", "DESCRIBE rollouts", "SHOW TABLES",
                                 "WITH x AS (FROM turns) SELECT count(*) FROM x",
                                 "PIVOT rollouts ON status USING avg(reward) GROUP BY task_id"])  # fmt: skip
def test_all_that_reads_is_allowed(small: Path, sql: str) -> None:
    """DuckDB's ways to look at data work."""
    assert gymdata.query(sql, small).num_rows > 0


@pytest.mark.parametrize(
    ("sql", "shown"),
    [
        (
            "SELECT avg(rewrd) FROM rollouts",
            ['Candidate bindings: "reward"', "views: rollouts", "`DESCRIBE rollouts`"],
        ),
        ("SELECT * FROM rollout", ['Did you mean "rollouts"?', "views: rollouts, turns, messages, failures"]),
        ("SELECT x.rol FROM turns x", ['column named "rol"', "views: rollouts, turns"]),
        ("SELECT task.level FROM rollouts", ["because it is not a struct", "task->>'level' is a field"]),
        ("SELEC 1 FROM rollouts", ["syntax error"]),
    ],
)
def test_mistakes_are_answered_with_what_there_is(small: Path, sql: str, shown: list[str]) -> None:
    """The error has DuckDB's nearest names, the views, and how a field of JSON text is read; and nothing of this for broken
    SQL."""
    with pytest.raises(UsageError) as mistake:
        gymdata.query(sql, small)
    assert [text for text in shown if text not in str(mistake.value)] == []
    assert ("views:" in str(mistake.value)) == (len(shown) > 1)


def test_changed_tokens_are_refused(tmp_path: Path) -> None:
    """Prompts are rebuilt only from turns whose digests match."""
    row = rollout("a", 0, 0.0, two_turns(1, 50))
    row["turns"][0]["generation_token_ids"] = [10, 12, 2]
    run = write_run(tmp_path / "run", [row])
    with pytest.raises(DataError, match="T209"):
        gymdata.query("SELECT prompt_token_ids FROM turns", run)
    assert gymdata.query("SELECT avg(reward) AS r FROM rollouts", run)["r"].to_pylist() == [0.0]


def test_paths_that_hold_nothing_are_explained(tmp_path: Path) -> None:
    """A missing path, a folder that is no run, a foreign file and a cut-off one each say what is wrong."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and nothing more")
    for name, what in (("gone", "no such"), ("empty", "not a run"), ("foreign.jsonl", "has the keys a"),
                       ("cut.parquet", "cut off"), ("no*thing", "matches")):  # fmt: skip
        with pytest.raises(DataError, match=what):
            gymdata.query("SELECT 1", tmp_path / name)


def test_a_split_folder_names_its_files(tmp_path: Path) -> None:
    """A folder whose files are not named after a table is answered with the files to give, by query and by others."""
    run = write_run(tmp_path / "run", [rollout("a", 0, 0.0, two_turns(1, 50)), rollout("b", 0, 1.0, two_turns(2, 50))])
    gymdata.filter(run, output=tmp_path / "split", split_by="task", test_share=0.5)
    with pytest.raises(DataError, match=r"is empty.*\n.*test.parquet, train.parquet"):
        gymdata.query("SELECT count(*) FROM rollouts", tmp_path / "split")
    with pytest.raises(DataError, match=r"is empty.*\n.*test.parquet, train.parquet"):
        gymdata.pairs(tmp_path / "split", output=tmp_path / "pairs")


def test_the_command_prints_tables_json_csv_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each output form has the same rows; exit code 2 for wrong SQL and for a path that is not there."""
    run = write_run(tmp_path / "run", [rollout("a", i, r, two_turns(1, 50 + i)) for i, r in enumerate([0.0, 1.0])])
    sql = "SELECT rollout_id, reward, [1, 2] AS ids FROM rollouts ORDER BY 1"
    assert main(["query", sql, str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["a-0", "0", "[1,", "2]"]
    assert main(["query", sql, str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][1] == {"rollout_id": "a-1", "reward": 1.0, "ids": [1, 2]}
    assert main(["query", sql, str(run), "--csv"]) == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[1] == ["a-0", "0.0", "[1,2]"]
    for name in ("out.parquet", "out.jsonl", "out.csv"):
        assert main(["query", sql, str(run), "-o", str(tmp_path / name)]) == 0
    assert pq.read_table(tmp_path / "out.parquet")["reward"].to_pylist() == [0.0, 1.0]
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["ids"] == [1, 2]
    assert list(csv.reader((tmp_path / "out.csv").open()))[1] == ["a-0", "0.0", "[1,2]"]
    assert main(["query", "SELECT nothing", str(run)]) == 2
    assert main(["query", sql, str(tmp_path / "gone")]) == 2


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out.csv"])
def test_only_the_same_result_is_written_over_a_file(small: Path, name: str) -> None:
    """-o never replaces a file that is read, nor without --overwrite any other, and a result never becomes rows of a run,
    which would be read as rollouts the next time."""
    target = small.parent / name
    again = ["query", "SELECT rollout_id FROM rollouts", str(small), "-o", str(target)]
    assert [main(again), main(again)] == [0, 0]
    target.write_text("precious")
    assert main(again) == 2
    assert target.read_text() == "precious"
    assert main([*again, "--overwrite"]) == 0
    for part in ("part-00000.parquet", "part-00001.parquet"):
        assert main([*again[:-1], str(small / "rollouts" / part), "--overwrite"]) == 2


def test_plain_duckdb_rebuilds_prompts(tmp_path: Path) -> None:
    """The macro of the documentation gives the same prompts without gymdata, for one rollout and for all."""
    page = (Path(gymdata.__file__).parent / "docs" / "without-gymdata.md").read_text()
    macro = "CREATE MACRO" + page.partition("CREATE MACRO")[2].partition(";")[0]
    rng = np.random.default_rng(3)
    rows = [rollout(f"odd{i}", 0, 0.5, calls) for i, calls in enumerate(ODD)] + [rollout("a", 0, 0.0, two_turns(1, 50))]
    for n in range(20):
        calls: list[tuple[list[int], list[int]]] = []
        for _ in range(int(rng.integers(1, 6))):
            before = calls[int(rng.integers(len(calls)))] if calls else ([1], [])
            held = [*before[0], *before[1]]
            keep = len(held) if rng.random() < 0.6 else int(rng.integers(1, len(held) + 1))
            calls.append(([*held[:keep], *rng.integers(3, 6, 2).tolist()], rng.integers(3, 6, 3).tolist()))
        rows.append(rollout(f"r{n}", 0, 0.0, calls))
    write_run(tmp_path / "run", rows)
    with duckdb.connect() as con:
        con.execute(macro.replace("runs/x/", f"{tmp_path}/run/"))
        found = con.execute("SELECT * FROM prompt_of(NULL) ORDER BY ALL").fetchall()
        one = con.execute("SELECT count(*) FROM prompt_of('odd1-0')").fetchone()
    expected = [(r["rollout_id"], k, p.tolist()) for r in rows for k, p in enumerate(expand_prompts(r["turns"]))]
    assert found == sorted(expected)
    assert one == (4,)


def test_a_query_of_no_files_is_refused() -> None:
    """With what is expected."""
    with pytest.raises(UsageError, match=r"gymdata.query: got no paths, expected the files that the SELECT reads"):
        gymdata.query("SELECT 1")


def test_folders_whose_names_look_like_globs_are_themselves(tmp_path: Path) -> None:
    """A run called ``q[1]`` or ``q*`` is read as that run and as no other."""
    for name, task, n in (("q1", "t", 2), ("q[1]", "u", 3), ("q*", "v", 4)):
        write_run(tmp_path / name, [rollout(task, i, 1.0, two_turns(5, 40)) for i in range(n)])
    sql = "SELECT task_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1"
    both = gymdata.query(sql, tmp_path / "q1", tmp_path / "q[1]", tmp_path / "q*")
    assert both.to_pylist() == [{"task_id": "t", "n": 2}, {"task_id": "u", "n": 3}, {"task_id": "v", "n": 4}]
    turns = gymdata.query("SELECT count(*) AS n FROM turns WHERE len(prompt_token_ids) > 0", tmp_path / "q[1]")
    assert turns.to_pylist() == [{"n": 6}]


def test_names_that_sql_cannot_tell_apart_are_numbered(tmp_path: Path) -> None:
    """Rewards that differ in case only, and columns of one name in an object of JSON, both keep their values."""
    parts = [{"name": "A", "value": 1.0}, {"name": "a", "value": 2.0}]
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(5, 40), rewards=parts)])
    assert gymdata.query("SELECT reward_A_1, reward_a_2 FROM rollouts", run).to_pylist() == [
        {"reward_A_1": 1.0, "reward_a_2": 2.0}
    ]
    with pytest.raises(UsageError, match="reward_A_1"):
        gymdata.query("SELECT reward_A FROM rollouts", run)
    assert gymdata.query("SELECT 'x' AS a, 'y' AS a", run).to_pylist() == [{"a": "x", "a_1": "y"}]


@pytest.mark.parametrize("sql", ["interval 1 day", "[interval 1 day]", "union_value(a := 1)"])
def test_what_parquet_cannot_hold_is_told(small: Path, capsys: pytest.CaptureFixture[str], sql: str) -> None:
    """A column of a type that Parquet has no form for is a mistake of the statement, with the cast that mends it."""
    target = small.parent / "q.parquet"
    assert main(["query", f"SELECT {sql} AS f", str(small), "-o", str(target)]) == 2
    assert "f::VARCHAR" in capsys.readouterr().err
    assert not target.exists()


def test_values_of_every_type_are_printed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON, CSV, JSON lines and the table hold every DuckDB type: as DuckDB writes it."""
    target = small.parent / "q.jsonl"
    for words in (["--json"], ["--csv"], [], ["-o", str(target)]):
        assert main(["query", "SELECT * FROM test_all_types()", str(small), *words]) == 0
        capsys.readouterr()
    odd = (
        "SELECT interval 1 day AS i, [interval 2 month] AS l, {'b': blob '\\xff'} AS s, '101'::BIT AS bits, "
        "union_value(a := 1) AS u, sum(1) AS n, 170141183460469231731687303715884105727 AS big, 1.50::DECIMAL(9, 2) AS d, "
        "'infinity'::TIMESTAMP AS t, [1, 2] AS ids, 0.5::DOUBLE AS x"
    )
    assert main(["query", odd, str(small), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == {
        "i": "1 day", "l": ["2 months"], "s": {"b": "\\xFF"}, "bits": "101", "u": {"a": 1}, "n": 1,
        "big": 170141183460469231731687303715884105727, "d": 1.5, "t": "infinity", "ids": [1, 2], "x": 0.5,
    }  # fmt: skip
    assert main(["query", odd + " -- the end", str(small), "-o", str(target), "--overwrite"]) == 0
    assert json.loads(target.read_text()) == row


def test_tables_have_the_types_of_the_result(small: Path) -> None:
    """Nested, enumerated and empty results arrive as DuckDB made them."""
    sql = "select 'a'::enum('a', 'b') as e, {'x': [1, null]} as s, 1::hugeint as h where "
    assert gymdata.query(sql + "true", small).to_pylist() == [{"e": "a", "s": {"x": [1, None]}, "h": 1}]
    assert gymdata.query(sql + "false", small).column_names == ["e", "s", "h"]


def test_times_in_a_table_are_read_as_times(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time is shown as 2026-01-02 03:04:05, and one item is one item."""
    sql = "SELECT TIMESTAMPTZ '2026-01-02 03:04:05.678901+00' AS t, [repeat('x', 80)] AS n"
    assert main(["query", sql, str(small)]) == 0
    shown = capsys.readouterr().out
    assert "2026-01-02 03:04:05.678901+00" in shown
    assert "datetime" not in shown
    assert "(1 item)" in shown


@pytest.mark.parametrize("terminal", [40, 160, None], indirect=True)
@pytest.mark.usefixtures("terminal")
def test_numbers_that_name_something_are_not_separated(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashes, ids, and what no one counts to: they can be copied, in a table, as records and in full. Amounts are
    separated."""
    sql = "SELECT 12345 AS n, 12346 AS prompt_hash, 12347 AS digest, 12348 AS my_id, 9007199254740993 AS b"
    for more in ([], ["--full"]):
        assert main(["query", sql, str(small), *more]) == 0
        shown = capsys.readouterr().out.split()
        assert {"12,345", "12346", "12347", "12348", "9007199254740993"} <= set(shown)


@pytest.mark.parametrize("terminal", [80, 100, 160, None], indirect=True)
@pytest.mark.usefixtures("terminal")
def test_tables_show_six_digits_and_every_other_form_all(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards that differ in the fifth digit look different, on a terminal and in a pipe; nothing is cut in --csv, --json
    and --full."""
    sql = "SELECT 0.9375::DOUBLE AS a, 0.93751::DOUBLE AS b, 0.123456789::DOUBLE AS c, 48000.0::DOUBLE AS d"
    assert main(["query", sql, str(small)]) == 0
    assert capsys.readouterr().out.split()[-4:] == ["0.9375", "0.93751", "0.123457", "48000"]
    for flag in ("--csv", "--json", "--full"):
        assert main(["query", sql, str(small), flag]) == 0
        shown = capsys.readouterr().out
        assert all(number in shown for number in ("0.9375", "0.93751", "0.123456789"))
