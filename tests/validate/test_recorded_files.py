"""Sealed files are compared with what run.json recorded of them: another file is a fault, whatever its rows are."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.store import hash_file, read_run_json, write_run_json
from gymdata.store.journal import line_of
from tests.rollout_files import edit_segment, rollout, write_run


def sealed(folder: Path, rows: int = 3) -> tuple[Path, Path]:
    """A run of JSON lines whose run.json says how its part was sealed; the run and the part."""
    run = write_run(folder, [rollout(f"t{k}", 0, 1.0, [([1, k], [20, 2])], text="42") for k in range(rows)], "jsonl")
    facts = read_run_json(run)
    (entry,) = facts["files"]
    part = run / entry["path"]
    entry |= {"bytes": part.stat().st_size, "xxh3": hash_file(part)}
    write_run_json(run, facts)
    return run, part


@pytest.mark.parametrize("longer", [False, True])
def test_a_changed_file_is_a_fault(tmp_path: Path, longer: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A text that no digest covers was edited: the file is an error, named with what differs, and the exit code is 1; no row
    is at fault, so --fix drop keeps them all and its copy has no error."""
    run, part = sealed(tmp_path / "run")
    before = validate(run)
    assert "T209" not in before.by_code
    assert "T209" not in validate(part).by_code
    assert main(["validate", str(run)]) == 0
    text = part.read_text()
    assert '"42"' in text
    edit_segment(part, '"42"', '"42 "' if longer else '"43"')
    after = validate(run)
    size = len(text)
    why = f"{part.stat().st_size:,} bytes, not {size:,}" if longer else "other bytes (xxh3)"
    (fault,) = [v for v in after.violations if v not in before.violations]
    assert (fault.code, fault.severity, fault.file, fault.turn) == ("T209", "error", str(part), None)
    assert fault.detail == f"differs from what {run / 'run.json'} recorded: {why}"
    assert after.trainable == before.trainable
    capsys.readouterr()
    assert main(["validate", str(run)]) == 1
    assert f"T209 digest mismatch; {fault.detail}" in capsys.readouterr().out
    assert main(["validate", str(run), "--ignore", "T209"]) == 0
    assert main(["validate", str(run), "--fix", "drop", "-o", str(tmp_path / "fixed.parquet")]) == 0
    assert f"{part}: {fault.detail}" in "".join(capsys.readouterr())
    assert validate(tmp_path / "fixed.parquet").rollouts == before.rollouts


def test_another_number_of_rows_is_a_fault(tmp_path: Path) -> None:
    """A run.json that says another number of rows than are in the file is named, with both."""
    run, part = sealed(tmp_path / "run")
    facts = read_run_json(run)
    facts["files"][0]["rows"] = 4
    write_run_json(run, facts)
    (fault,) = [v for v in validate(run).violations if v.code == "T209"]
    assert (fault.file, fault.detail) == (str(part), "holds 3 rows, and its run.json says 4")


def test_damaged_records_of_failures_are_named(tmp_path: Path) -> None:
    """A line whose checksum does not match, and one that is no object, by file and line."""
    run, _ = sealed(tmp_path / "run")
    failures = run / "failures.jsonl"
    failures.write_bytes(
        line_of(b'{"kind":"engine"}') + line_of(b'{"kind":"engine"}').replace(b"eng", b"emg") + b"[]\n"
    )
    assert main(["validate", str(run)]) == 1
    found = [(v.file, v.row, str(v.detail)[:14]) for v in validate(run).violations if v.code == "S101"]
    assert found == [(str(failures), 1, "damaged line 2"), (str(failures), 2, "damaged line 3")]
