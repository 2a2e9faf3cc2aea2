"""Saved queries, sequences of ids, and SQL and paths in either order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.query.saved import SAVED
from gymdata.store.parquet import broken_parquet
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [rollout(f"t{t}", i, float(i), two_turns(t, 50 + i)) for t in range(2) for i in range(2)]
    return write_run(tmp_path / "run", rows)


def test_a_file_of_another_kind_is_named_with_its_folder(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    for option, kind in (("-o", ".parquet, .csv, .jsonl"), ("--database", ".duckdb")):
        words = [str(run), option, "run/x.txt", *(["SELECT 1"] if option == "-o" else [])]
        assert main(["query", *words]) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert f"{option}: got 'run/x.txt', expected a name ending in {kind}" in message


def test_saved_queries_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every one has an answer over a run, and is listed."""
    assert main(["query", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in SAVED:
        assert f":{name}\n" in listed
        assert main(["query", f":{name}", str(run), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["columns"]


def test_a_tool_is_called_by_the_name_of_its_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its result has only the call's id, as chat messages of OpenAI's interface do."""
    row = rollout("t", 0, 1.0, two_turns(1, 20))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    row["messages"][1]["tool_calls"], row["messages"][2]["tool_call_id"] = json.dumps([call]), "c1"
    assert main(["query", ":tools-called", str(write_run(tmp_path / "run", [row])), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"tool": "add", "results": 1, "rollouts": 1}]


def test_sql_and_paths_stand_in_either_order(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQL first, last, from stdin, and without a blank; what is neither is an error that says what was expected."""
    for words in (["SELECT 4 AS n", str(run)], [str(run), "SELECT 4 AS n"], [str(run), "-"], ["-", str(run)]):
        monkeypatch.setattr("sys.stdin", io.StringIO("SELECT count(*) AS n FROM rollouts"))
        assert main(["query", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == [{"n": 4}]
    for words, said in (
        ([str(run)], "got no SQL"),
        (["SELECT 1", "SELECT 2", str(run)], "got 2 statements"),
        (["SELECT 1"], "no path given"),
        (["SELECT 1", str(run / "absent")], "no such file or folder"),
    ):
        assert main(["query", *words]) == 2
        assert said in capsys.readouterr().err


def test_sequences_of_ids_are_found(run: Path) -> None:
    """find_ids gives turn and position of every place in the generations; nothing, for what is not there or empty."""
    sql = "SELECT find_ids(turns, {}) AS f FROM rollouts WHERE rollout_id = 't1-1'"
    assert gymdata.query(sql.format("[10, 11]"), run).to_pylist() == [{"f": [{"turn": 0, "position": 0}]}]
    assert gymdata.query(sql.format("[2]"), run).to_pylist() == [
        {"f": [{"turn": 0, "position": 2}, {"turn": 1, "position": 1}]}
    ]
    for nothing in ("[11, 10]", "[]", "[10, 11, 2, 30]"):
        assert gymdata.query(sql.format(nothing), run).to_pylist() == [{"f": []}]
    count = "SELECT count(*) AS n FROM rollouts WHERE len(find_ids(turns, [51, 2])) > 0"
    assert gymdata.query(count, run).to_pylist() == [{"n": 2}]


def test_whole_conversations_are_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--full prints every message, with what a terminal would act on escaped, and long values uncut."""
    row = rollout("x", 0, 1.0, two_turns(1, 9), text="\x1b[31mred\n" + "long " * 200)
    path = write_run(run.parent / "other", [row])
    assert main(["query", "SELECT messages, started_at FROM rollouts", str(path), "--full"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "row 1\n  messages\n    user:\n      question x\n    assistant:\n      calling\n    tool:\n      42\n"
    )
    assert "      \\x1b[31mred\n" in said
    assert "long " * 199 in said
    assert "  started_at  2026-01-01 00:00:00+00" in said


def test_csv_on_a_terminal_has_no_escape_sequences(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a terminal would act on is written as text there; a pipe gets the value as it is."""
    sql = "SELECT chr(27) || ']0;title' || chr(7) AS text"
    assert main(["query", sql, str(run), "--csv"]) == 0
    assert capsys.readouterr().out == "text\n\x1b]0;title\x07\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["query", sql, str(run), "--csv"]) == 0
    assert capsys.readouterr().out == "text\n\\x1b]0;title\\x07\n"


def test_memory_that_is_short_is_not_a_damaged_file(run: Path) -> None:
    """What Arrow cannot allocate while it reads a file is MemoryError, and never advice to write the file again."""
    error = OSError("Couldn't deserialize thrift: std::bad_alloc")
    with pytest.raises(MemoryError, match="bad_alloc"):
        broken_parquet(run / "rollouts.parquet", error)
