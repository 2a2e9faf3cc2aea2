"""The validate command: exit codes, what is printed, what is loaded."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymdata import import_rollouts
from gymdata.cli.main import main
from tests.validate.generate import native_rows, nemo_rows, with_ids, write_lines, write_native


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when clean, 1 with errors or without rows, 2 for a missing path or an unknown code."""
    clean = write_native(tmp_path, native_rows(n=2), "parquet")
    assert main(["validate", str(clean)]) == 0
    rows = native_rows(n=2)
    rows[1]["turns"][2]["generation_token_ids"][0] ^= 1
    broken = write_native(tmp_path, rows, "jsonl")
    assert main(["validate", str(broken)]) == 1
    assert main(["validate", str(broken), "--ignore", "T209"]) == 0
    (tmp_path / "empty.jsonl").touch()
    assert main(["validate", str(tmp_path / "empty.jsonl")]) == 1
    for arguments in (["nowhere.parquet"], [str(broken), "--select", "X1"], []):
        assert main(["validate", *arguments]) == 2
    assert "error:" in capsys.readouterr().err


def test_json_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json gives every violation with the documented keys, infos included."""
    rows = native_rows(n=100)
    for row in rows:
        row["turns"][1]["digest"] += 1
    assert main(["validate", str(write_native(tmp_path, rows, "parquet")), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {k: report[k] for k in ("rollouts", "turns", "errors", "warnings", "by_code")} == {
        "rollouts": 100, "turns": 400, "errors": 100, "warnings": 0, "by_code": {"T209": 100},
    }  # fmt: skip
    assert len(report["violations"]) == 100
    first = report["violations"][0]
    assert (first["rollout_id"], first["row"], first["turn"], first["code"]) == ("t0-0", 0, 1, "T209")
    assert set(first) >= {"severity", "position", "expected", "got", "detail"}


def test_lines_say_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding is one line: file and line, turn and position, code and words; the summary counts by code."""
    rows = nemo_rows(n=2)
    with_ids(rows[1], 2)["prompt_token_ids"][1] = 999
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert main(["validate", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path} line 2 turn 2 pos 1  T200 break" in out
    assert "1  T200" in out
    assert main(["validate", str(path), "--quiet"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_lines_that_say_the_same_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Findings that differ in their row only are shown three times and counted; turns, and other details, stay visible;
    -v and --json list all."""
    rows = nemo_rows(n=60)
    with_ids(rows[59], 2)["prompt_token_ids"][1] = 999
    path = write_lines(tmp_path / "a.jsonl", [*rows, *["not JSON"] * 60, "[]"])
    assert main(["validate", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.count("  S101 unreadable row; not JSON") == 3
    assert "line 121  S101 unreadable row; got list, expected an object" in out
    assert "line 60 turn 2 pos 1  T200" in out
    assert "… and 57 more" in out
    assert "61  S101" in out
    assert main(["validate", str(path), "-v"]) == 1
    assert capsys.readouterr().out.count("  S101 unreadable row") == 61
    assert main(["validate", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["by_code"]["S101"] == 61


def test_lines_are_those_of_an_editor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON lines, lines count from 1, with blank ones; a Parquet file has rows, and --json counts rows from 0."""
    rows = native_rows(n=3)
    rows[1]["turns"][1]["digest"] += 1
    parquet, lines = write_native(tmp_path, rows, "parquet"), write_native(tmp_path, rows, "jsonl")
    assert main(["validate", str(parquet)]) == 1
    assert f"{parquet} row 1 t0-1 turn 1  T209" in capsys.readouterr().out
    first, second, third = lines.read_text().splitlines()
    lines.write_text(f"\n{first}\n  \n{second}\n{third}\nnot JSON\n")
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    for file in (lines, packed):
        assert main(["validate", str(file)]) == 1
        out = capsys.readouterr().out
        assert f"{file} line 4 t0-1 turn 1  T209" in out
        assert f"{file} line 6  S101" in out
        assert main(["validate", str(file), "--json"]) == 1
        assert [v["row"] for v in json.loads(capsys.readouterr().out)["violations"]] == [1, 3]


def test_fix_writes_beside_and_says_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--fix needs -o, prints the cost of every choice, and ends with 0 when no error, but some rollout, is left."""
    rows = nemo_rows(n=2)
    with_ids(rows[1], 2)["prompt_token_ids"][1] = 999
    path = tmp_path / "run"
    import_rollouts(write_lines(tmp_path / "a.jsonl", rows), path)
    assert main(["validate", str(path), "--fix", "truncate"]) == 2
    capsys.readouterr()
    assert main(["validate", str(path), "--fix", "truncate", "-o", str(tmp_path / "b.jsonl"), "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    assert (account["rollouts_in"], account["rollouts_out"], account["errors_after"]) == (2, 2, 0)
    assert set(account["costs"]) == {"split", "truncate", "drop"}
    assert main(["validate", str(path), "--fix", "drop", "-o", str(tmp_path / "c.jsonl")]) == 0
    assert "→ drop" in capsys.readouterr().out
    import_rollouts(write_lines(tmp_path / "broken.jsonl", rows[1:]), tmp_path / "broken")
    assert main(["validate", str(tmp_path / "broken"), "--fix", "drop", "-o", str(tmp_path / "d.jsonl")]) == 1
    assert "--fix drop leaves no rollout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
)
def test_a_file_of_another_project_is_imported_first(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the command that reads it, whatever else is in the file, and also of --fix."""
    for rows in ([row], [row, "{"]):
        path = write_lines(tmp_path / "a.jsonl", rows)
        for more in ([], ["--fix", "drop", "-o", str(tmp_path / "b.jsonl")]):
            assert main(["validate", str(path), *more]) == 2
            shown = capsys.readouterr().err
            assert "as text, expected rollouts or pairs" in shown
            assert f"`gymdata import {path} -o RUN` reads it" in shown


@pytest.mark.parametrize("kind", ["nemo", "jsonl", "parquet"])
def test_only_what_is_needed_is_loaded(tmp_path: Path, kind: str) -> None:
    """No engine, trainer or Polars is imported; NeMo Gym rows do without pyarrow; the tokenizer's texts are asked for only
    when a rollout breaks."""
    path = (
        write_lines(tmp_path / "a.jsonl", nemo_rows(n=2))
        if kind == "nemo"
        else write_native(tmp_path, native_rows(n=2), kind)
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 999}}}))
    code = (
        "import sys; from gymdata.cli.main import main; status = main(['validate', *sys.argv[1:]]); heavy = {'torch', "
        "'vllm', 'trl', 'ray', 'transformers', 'tokenizers', 'polars', 'duckdb', 'pyarrow'} & set(sys.modules);"
        "print(status, sorted(heavy))"
    )
    words = [sys.executable, "-c", code, str(path), "--tokenizer", str(tmp_path)]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == f"0 {[] if kind == 'nemo' else ['pyarrow']}"


@pytest.mark.parametrize(
    ("code", "advice"),
    [("L302", "--fix drop"), ("S101", "remove the row"), ("P601", "gymdata pairs RUN"), ("B808", "--ignore B808")],
)
def test_an_explanation_says_what_to_do(code: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a paragraph of its own, whatever the kind of finding."""
    assert main(["validate", "--explain", code]) == 0
    paragraph = capsys.readouterr().out.split("\n\n")[-1]
    assert paragraph.startswith("What to do: ")
    assert advice in paragraph


def test_an_explanation_wraps_at_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is wider than the 80 columns of the terminal, and no word is cut; in a pipe a paragraph is one line, and with
    ``--json`` the code is an object with its parts."""
    assert main(["validate", "--explain", "t209", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert (explained["code"], explained["severity"]) == ("T209", "error")
    assert set(explained) == {"code", "name", "severity", "meaning", "explanation"}
    assert main(["validate", "--explain", "T209"]) == 0
    piped = capsys.readouterr().out
    assert len(piped.split("\n\n")) == 4
    assert "digest" in piped
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    assert main(["validate", "--explain", "T209"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == piped.split()
