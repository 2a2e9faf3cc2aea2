"""The views as a DuckDB file: what any client reads of it."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

import gymdata
from gymdata.cli.main import main
from tests.query.conftest import ODD
from tests.rollout_files import rollout, two_turns, write_run


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_every_view_is_that_of_a_query(tmp_path: Path, suffix: str) -> None:
    """Rollouts with columns of their rewards, turns with their prompts (also of breaks, branches and retries), messages,
    failures and what a stage wrote; NaN is NULL, and a folder that looks like a glob is itself."""
    rows = [rollout(f"odd{i}", 0, 0.5, calls) for i, calls in enumerate(ODD)]
    rows += [rollout("a", i, r, two_turns(1, 50 + i)) for i, r in enumerate([0.0, 1.0, float("nan")])]
    run = write_run(tmp_path / "q[1]*", rows, suffix)
    write_run(tmp_path / "q1x", [rollout("other", 0, 1.0, two_turns(1, 50))])
    (run / "failures.jsonl").write_text(json.dumps({"kind": "engine", "attempt": 2, "rollout_id": "t9-0"}) + "\n")
    gymdata.pairs(run, breaks="drop")
    file = tmp_path / "views.duckdb"
    assert main(["query", str(run), "--database", str(file)]) == 0
    with duckdb.connect(file, read_only=True) as con:
        for view in ("rollouts", "turns", "messages", "failures", "pairs"):
            of_query = gymdata.query(f"SELECT * FROM {view} ORDER BY ALL", run)
            assert con.sql(f"SELECT * FROM {view} ORDER BY ALL").to_arrow_table().to_pylist() == of_query.to_pylist()
        found = "SELECT count(*) FROM rollouts WHERE len(find_ids(turns, [51, 2])) > 0"
        assert con.execute(found).fetchone() == (1,)


def test_a_database_is_no_result_and_replaces_nothing(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there stays without --overwrite; other names, other outputs, SQL and a missing path are refused."""
    file = small.parent / "views.duckdb"
    file.write_text("precious")
    for words, said in (
        ([str(small), "--database", str(file)], "is there already"),
        ([str(small), "--database", str(file.with_suffix(".db"))], "a name ending in .duckdb"),
        ([str(small), "--database", str(file), "--csv"], "no result"),
        (["SELECT 1", str(small), "--database", str(file), "--overwrite"], "leave out the SQL"),
        (["none", "--database", str(file), "--overwrite"], "no such file or folder"),
        (["--database", str(file), "--overwrite"], "no path given"),
    ):
        assert main(["query", *words]) == 2
        assert said in capsys.readouterr().err
    assert file.read_text() == "precious"
    assert main(["query", str(small), "--database", str(file), "--overwrite"]) == 0
    with duckdb.connect(file, read_only=True) as con:
        assert con.execute("SELECT count(*) FROM rollouts").fetchone() == (1,)
