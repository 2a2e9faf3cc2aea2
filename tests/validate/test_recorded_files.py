"""Sealed files are compared with what run.json recorded of them: a note, and no fault by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.store import hash_file, read_run_json, write_run_json
from gymdata.validate.run import validate
from tests.rollout_files import rollout, two_turns, write_run


def sealed(folder: Path, rows: int = 3) -> tuple[Path, Path]:
    """A run of JSON lines whose run.json says how its part was sealed; the run and the part."""
    run = write_run(folder, [rollout(f"t{k}", 0, 1.0, two_turns(k, 20)) for k in range(rows)], "jsonl")
    facts = read_run_json(run)
    (entry,) = facts["files"]
    part = run / entry["path"]
    entry |= {"bytes": part.stat().st_size, "xxh3": hash_file(part)}
    write_run_json(run, facts)
    return run, part


def test_an_untouched_run_has_no_note(tmp_path: Path) -> None:
    """What was sealed is what is there, by the folder and by the file."""
    run, part = sealed(tmp_path / "run")
    assert validate(run).notes == []
    assert validate(part).notes == []


@pytest.mark.parametrize("longer", [False, True])
def test_a_changed_file_is_noted_and_not_refused(
    tmp_path: Path, longer: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that no digest covers was edited: the file is named, errors and exit code are as without the note."""
    run, part = sealed(tmp_path / "run")
    before = validate(run)
    text = part.read_text()
    assert '"42"' in text
    part.write_text(text.replace('"42"', '"42 "' if longer else '"43"', 1))
    after = validate(run)
    assert len(after.notes) == 1
    assert part.name in after.notes[0]
    assert ("bytes, not" in after.notes[0]) == longer
    assert after.to_dict()["notes"] == after.notes
    assert (after.errors, after.violations) == (before.errors, before.violations)
    assert main(["validate", str(run)]) == (0 if before.ok else 1)
    assert "note: " in capsys.readouterr().out
