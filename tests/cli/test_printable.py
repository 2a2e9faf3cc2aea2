"""Data cannot act on the terminal: what is printed of rollouts, files and errors has its control characters escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli import console
from gymdata.cli.main import main
from gymdata.errors import printable
from tests.rollout_files import rollout, two_turns, write_run
from tests.validate.generate import nemo_rows, with_ids, write_lines

HOSTILE = "\x1b[2J\x9b31m\r\u202egnp\u2066\x07\u200f"
ESCAPED = r"\x1b[2J\x9b31m\r\u202egnp\u2066\x07\u200f"
ACTS = set("\x1b\x9b\r\u202e\u2066\x07\u200f")


def test_what_is_escaped_and_what_stays() -> None:
    """Controls, overrides and lone surrogates become escapes; line ends, tabs, scripts and emoji stay."""
    assert printable(HOSTILE) == ESCAPED
    assert printable("a\n\tb") == "a\n\tb"
    assert printable("a\n\tb", lines=False) == r"a\n\tb"
    assert printable("\ud800") == r"\ud800"
    assert printable("naïve 👩\u200d💻 می\u200cخواهم\u00a0日本") == "naïve 👩\u200d💻 می\u200cخواهم\u00a0日本"


def quiet(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was printed, which holds nothing that a terminal acts on."""
    read = capsys.readouterr()
    both = read.out + read.err
    assert not ACTS & set(both)
    return both


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose ids, messages and reward names are hostile, one rollout twice and one changed."""
    rows: list[dict[str, Any]] = [rollout(HOSTILE, n, float(n), two_turns(5, 20 + n), text=HOSTILE) for n in range(2)]
    for row in rows:
        row["rewards"] = [{"name": HOSTILE, "value": row["reward"]}]
    rows[1]["turns"][1]["digest"] += 1
    return write_run(tmp_path / "run", [*rows, rows[0]])


def test_validate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Findings name hostile ids and stay on their lines; the JSON holds the very ids."""
    assert main(["validate", str(run), "-v"]) == 1
    assert ESCAPED in quiet(capsys)
    assert main(["validate", str(run), "--json"]) == 1
    assert json.loads(quiet(capsys))["violations"][0]["rollout_id"].startswith(HOSTILE)


def test_file_names_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hostile names of files, and values that errors quote."""
    rows = nemo_rows(n=2)
    with_ids(rows[1], 1)["generation_token_ids"][0] = HOSTILE
    file = write_lines(tmp_path / f"{HOSTILE}.jsonl", rows)
    assert main(["validate", str(file)]) == 1
    assert f"{ESCAPED}.jsonl" in quiet(capsys)
    assert main(["validate", str(tmp_path / f"no {HOSTILE}")]) == 2
    assert ESCAPED in quiet(capsys)
    assert main(["import", str(file), "-o", str(tmp_path / f"to {HOSTILE}")]) == 1
    assert ESCAPED in quiet(capsys)
    main(["validate", "-v", str(tmp_path / f"no {HOSTILE}")])
    assert "Traceback" in quiet(capsys)
    main([f"no-command-{HOSTILE}"])
    quiet(capsys)


@pytest.mark.parametrize("flag", [None, "--json"])
def test_query(run: Path, flag: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages and column names of a query."""
    sql = f"SELECT rollout_id, messages, 1 AS \"{HOSTILE}\" FROM rollouts WHERE rollout_id LIKE '%1'"
    assert main(["query", sql, str(run), *([flag] if flag else [])]) == 0
    assert (ESCAPED if flag is None else r"\u202e") in quiet(capsys)


def test_everything_that_commands_print_with(capsys: pytest.CaptureFixture[str]) -> None:
    """Tables, facts, notes and progress messages."""
    console.facts(HOSTILE, [(HOSTILE, HOSTILE), ("list", [HOSTILE])])
    console.grid([HOSTILE], [[HOSTILE]], title=HOSTILE)
    console.note(HOSTILE)
    console.say(HOSTILE)
    console.emit_json({HOSTILE: HOSTILE})
    with console.Watch("x") as watch:
        watch.message(HOSTILE)
    assert quiet(capsys).count("gnp") >= 9
